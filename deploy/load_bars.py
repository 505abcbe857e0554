"""How far agents are with their model: a bar for each on a terminal, else a line for each tenth."""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.text import Text

from deploy.overview import Agent
from deploy.terminal import cell, one_line, size

WORDS = {
    "swapping": "changes its model",
    "waits_for_turn": "waits for its turn to change the model",
    "loading": "loading the model",
    "no_model": "has no model",
    "retrying": "tries again",
}
"""Of states; the others are their own word."""


@dataclass(frozen=True, slots=True)
class Row:
    key: str
    """Of the agent."""
    title: str
    words: str
    part: float | None = None
    """Of what is to be done; None: nobody knows."""
    is_download: bool = False
    current: int = 0
    """In bytes, of a download."""


def load_row(agent: Agent) -> Row:
    """What the agent does about its model."""
    title = one_line(agent.title)
    download = agent.download
    if download is None:
        words = WORDS.get(agent.state, agent.state.replace("_", " "))
        return Row(agent.id, title, words, part=1.0 if agent.state == "ready" else None)
    much = f", {size(download.current)}"
    part = None
    if download.total:
        part = download.current / download.total
        much = f", {part:.0%} of {size(download.total)}"
    words = f"fetching {one_line(download.filename)}{much}"
    return Row(agent.id, title, words, part, is_download=True, current=download.current)


class LoadBars(AbstractContextManager["LoadBars"]):
    def __init__(self, console: Console) -> None:
        self._console = console
        self._told: dict[str, tuple[str, int]] = {}
        """The line that was printed last, and the tenth that it told."""
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        if console.is_terminal:
            self._bars = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=24),
                _Words(),
                console=console,
                transient=True,
            )

    def __enter__(self) -> "LoadBars":
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def show(self, rows: Iterable[Row]) -> None:
        """All that there is now."""
        rows = tuple(rows)
        if self._bars is None:
            for row in rows:
                self._print(row)
            return
        for key in self._tasks.keys() - {row.key for row in rows}:
            self._bars.remove_task(self._tasks.pop(key))
        for row in rows:
            self._draw(self._bars, row)

    def _draw(self, bars: Progress, row: Row) -> None:
        total = None if row.part is None else 1.0
        if row.key not in self._tasks:
            self._tasks[row.key] = bars.add_task(row.title, total=total, words="")
        # What a task was told of its total before, it does not forget by being told None.
        task = bars.tasks[bars.task_ids.index(self._tasks[row.key])]
        task.total = total
        bars.update(self._tasks[row.key], completed=row.part or 0.0, words=row.words)

    def _print(self, row: Row) -> None:
        tenth = int((row.part or 0.0) * 10) if row.is_download else 0
        words = row.words.rpartition(",")[0] if row.is_download else row.words
        if self._told.get(row.key) != (words, tenth):
            self._told[row.key] = (words, tenth)
            self._console.print(
                f"{row.title}: {row.words}", markup=False, highlight=False, soft_wrap=True
            )


class _Words(ProgressColumn):
    def render(self, task: Task) -> Text:
        return cell(task.fields["words"])
