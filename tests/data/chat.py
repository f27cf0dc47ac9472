"""Small tokenizers with chat templates, for tests of rendering."""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tandem.models.tiny import character_tokenizer

CHATML = (
    "{% for m in messages %}[{{ m['role'][0] }}]{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}<eos>{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}[a]{% endif %}"
)
FORGETFUL = (
    "{% for m in messages %}[{{ m['role'][0] }}]"
    "{{ m['content'] if m['role'] == 'user' or loop.last else m['content'].split('|')[-1] }}"
    "{% if m['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[a]{% endif %}"
)


def with_template(template: str) -> PreTrainedTokenizerBase:
    tokenizer = character_tokenizer("abcdefghijklmnopqrstuvwxyz []|=+0123456789\n")
    tokenizer.chat_template = template
    return tokenizer


def with_bos(template: str | None = None, *, adds_eos: bool = False) -> PreTrainedTokenizerBase:
    """A character tokenizer that adds ``<s>`` (id 1), and if asked ``</s>`` (id 2), by default."""
    vocabulary = {token: index for index, token in enumerate(["<unk>", "<s>", "</s>", *"abcu:"])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    backend.post_processor = TemplateProcessing(
        single="<s> $A </s>" if adds_eos else "<s> $A", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template=template,
    )


# What the families of templates do, written small. ``{}``: every turn ends in <eos>, except where
# said.
FAMILIES = {
    # ChatML: nothing is changed, a line break follows the end.
    "chatml": (
        "{% for m in messages %}<eos>{{ m['role'][0] }}\n{{ m['content'] }}<eos>\n{% endfor %}"
        "{% if add_generation_prompt %}<eos>a\n{% endif %}"
    ),
    # Llama 3: BOS once, contents are trimmed, nothing follows the end, tools answer as "i".
    "llama": (
        "{{ bos_token }}{% for m in messages %}[{{ 'i' if m['role'] == 'tool' else m['role'][0] }}]"
        "\n\n{{ m['content'] | trim }}<eos>{% endfor %}"
        "{% if add_generation_prompt %}[a]\n\n{% endif %}"
    ),
    # Qwen with thoughts: those before the last question of the user are taken out.
    "qwen_thinking": (
        "{% set ns = namespace(last=0) %}"
        "{% for m in messages %}{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}"
        "{% endif %}{% endfor %}"
        "{% for m in messages %}[{{ m['role'][0] }}]\n"
        "{% if m['role'] == 'assistant' and loop.index0 < ns.last %}"
        "{{ m['content'].split('|')[-1] }}{% else %}{{ m['content'] }}{% endif %}<eos>\n"
        "{% endfor %}"
        "{% if add_generation_prompt %}[a]\n{% endif %}"
    ),
    # SmolLM: a system message of its own when there is none.
    "smollm": (
        "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}[s]\nhelp<eos>\n"
        "{% endif %}[{{ m['role'][0] }}]\n{{ m['content'] }}<eos>\n{% endfor %}"
        "{% if add_generation_prompt %}[a]\n{% endif %}"
    ),
}
