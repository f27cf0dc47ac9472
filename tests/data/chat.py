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
