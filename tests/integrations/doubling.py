"""A taskset of verifiers.v1: numbers to double with a tool that a server offers."""

from __future__ import annotations

from collections.abc import Iterable

import verifiers.v1 as vf

__all__ = ["Doubling"]


class Data(vf.TaskData):
    """A task's data."""

    answer: str


class Calculator(vf.Toolset[vf.ToolsetConfig]):
    """A tool server, a process for each rollout."""

    @vf.tool
    async def double(self, x: int) -> str:
        """Twice x."""
        return str(2 * x)


class Config(vf.TaskConfig):
    """Whether there are tools."""

    tools: bool = False


class Double(vf.Task[Data, vf.State, Config]):
    """Scores the last word of the last message."""

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        """1 for the answer as the last word."""
        return float(str(trace.assistant_messages[-1].content or "").split()[-1:] == [self.data.answer])

    @classmethod
    def toolsets(cls, config: Config) -> list[vf.Toolset]:
        """A calculator if the configuration asks for it."""
        return [Calculator(vf.ToolsetConfig())] if config.tools else []


class TasksetConfig(vf.TasksetConfig):
    """Its own task's configuration, and how many."""

    task: Config = Config()
    endless: bool = False


class Doubling(vf.Taskset[Double, TasksetConfig]):
    """Three tasks, or without end."""

    def __init__(self, config: TasksetConfig) -> None:
        super().__init__(config)
        self.INFINITE = config.endless

    def load(self) -> Iterable[Double]:
        """See `Taskset`."""
        n = 21
        while self.config.endless or n < 24:
            yield Double(Data(prompt=f"twice {n}?", system_prompt="be brief", answer=str(2 * n)), self.config.task)
            n += 1


if __name__ == "__main__":
    Calculator.run()
