"""``tandem rollouts``: what the trajectory store of a run holds, for reading and for export."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tandem.errors import ConfigError, DataError
from tandem.types import EPISODE_STRIDE, EpisodeState

if TYPE_CHECKING:
    from tandem.store import Content, Query, SqliteStore, StoredEpisode

COLUMNS = (
    "episode",
    "attempt",
    "state",
    "step",
    "versions",
    "reward",
    "rows",
    "tokens",
    "seconds",
    "reason",
)


class Action(StrEnum):
    """What to do with the attempts that are found."""

    LIST = "list"
    SHOW = "show"
    EXPORT = "export"


def rollouts(
    run_dir: Annotated[Path, typer.Argument(help="A run's directory, e.g. outputs/quickstart.")],
    action: Annotated[Action, typer.Argument(help="list, show or export.")] = Action.LIST,
    episode: Annotated[
        str | None, typer.Argument(help="EPOCH:POSITION, as a listing prints it; for show.")
    ] = None,
    state: Annotated[
        list[EpisodeState] | None, typer.Option(help="Only this state; may be repeated.")
    ] = None,
    step: Annotated[int | None, typer.Option(help="Only what this training step took.")] = None,
    min_reward: Annotated[float | None, typer.Option(help="Mean reward, at least.")] = None,
    max_reward: Annotated[float | None, typer.Option(help="Mean reward, at most.")] = None,
    attempt: Annotated[int | None, typer.Option(help="Only this attempt.")] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="The newest so many; list: 20, export: all.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="For export: FILE.jsonl or FILE.parquet.")
    ] = None,
) -> None:
    """List, show or export what a run rolled out."""
    from tandem.store import Query

    query = Query(
        states=frozenset(state) if state else None,
        episode_id=None if episode is None else parse_episode(episode),
        attempt=attempt,
        step=step,
        min_reward=min_reward,
        max_reward=max_reward,
        limit=limit if limit or action is not Action.LIST else 20,
        newest=True,
    )
    console = Console(soft_wrap=True)
    with _opened(run_dir) as store:
        if action is Action.LIST:
            _list(console, store, query)
        elif action is Action.SHOW:
            _show(console, store, query)
        else:
            _export(console, store, query, out)


def parse_episode(text: str) -> int:
    """The id of an episode from ``EPOCH:POSITION``, or from its number."""
    parts = text.split(":")
    if len(parts) > 2 or not all(part.isascii() and part.isdigit() for part in parts):
        raise ConfigError(f"episode: got {text!r}, allowed: EPOCH:POSITION, such as 0:17")
    numbers = [int(part) for part in parts]
    return numbers[0] if len(numbers) == 1 else numbers[0] * EPISODE_STRIDE + numbers[1]


@contextmanager
def _opened(run_dir: Path) -> Iterator[SqliteStore]:
    if not run_dir.is_dir():
        raise ConfigError(f"run directory {str(run_dir)!r}: there is none")
    from tandem.store import STORE_FILE, SqliteStore

    store = SqliteStore(run_dir / STORE_FILE, read_only=True)
    try:
        yield store
    finally:
        store.close()


def _name(episode: StoredEpisode) -> str:
    epoch, position = divmod(episode.episode_id, EPISODE_STRIDE)
    return f"{epoch}:{position}"


def _versions(episode: StoredEpisode) -> str:
    oldest, newest = episode.oldest_version, episode.newest_version
    if oldest is None:
        return "-"
    return str(oldest) if oldest == newest else f"{oldest}-{newest}"


def _or_dash(value: object) -> str:
    return "-" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)


def _list(console: Console, store: SqliteStore, query: Query) -> None:
    counts = ", ".join(f"{state.value} {n}" for state, n in sorted(store.counts().items()))
    console.print(Text(counts or "the store is empty"))
    found = store.find(query)
    if not found:
        return
    table = Table(box=None, pad_edge=False)
    for name in COLUMNS:
        table.add_column(name, justify="left" if name in ("state", "reason") else "right")
    for item in found:
        table.add_row(
            _name(item),
            str(item.attempt),
            item.state.value,
            _or_dash(item.step),
            _versions(item),
            _or_dash(item.reward),
            str(item.num_rows),
            str(item.num_tokens),
            f"{item.running_s:.2f}",
            Text((item.reason or "").partition("\n")[0]),
        )
    console.print(table)


def _show(console: Console, store: SqliteStore, query: Query) -> None:
    if query.episode_id is None:
        raise ConfigError("show: name an episode, such as 0:17; `list` prints them")
    found = store.find(query)
    if not found:
        raise DataError("show: no attempt in the store is like this")
    for item in found:
        content = store.content(item.key)
        title = f"episode {_name(item)} attempt {item.attempt}: {item.state.value}"
        console.print(Text(title, style="bold"))
        for line in (*_facts(item), *_texts(content)):
            console.print(Text(line))


def _facts(item: StoredEpisode) -> Iterator[str]:
    if item.reason:
        yield f"reason: {item.reason}"
    if item.step is not None:
        yield f"trained in step {item.step}"
    yield f"weights: versions {_versions(item)} of start {item.incarnation}"
    yield f"reward {_or_dash(item.reward)}, {item.num_rows} rows, {item.num_tokens} trained tokens"
    yield f"queued for {item.queued_s:.2f} s, ran for {item.running_s:.2f} s"


def _texts(content: Content) -> Iterator[str]:
    for span in content.spans:
        more = {k: v for k, v in span.items() if k not in ("name", "start_s", "s")}
        told = ", ".join(f"{name} {value}" for name, value in more.items())
        start, length = float(span.get("start_s", 0.0)), float(span.get("s", 0.0))
        yield f"  {start:8.3f} s  {span.get('name')}: {length:.3f} s{', ' if told else ''}{told}"
    if content.prompt is not None:
        yield f"prompt: {content.prompt}"
    for index, text in enumerate(content.completions):
        reward = content.rewards[index] if index < len(content.rewards) else None
        yield f"[{index}] reward {_or_dash(reward)}: {text}"


def _export(console: Console, store: SqliteStore, query: Query, out: Path | None) -> None:
    if out is None:
        raise ConfigError("export: name a file with --out FILE.jsonl or --out FILE.parquet")
    from tandem.rollout.export import export_rollouts

    number = export_rollouts(store, out, query)
    console.print(Text(f"{number} trajectories written to {out}"))
