"""Run in a process of its own, with a directory: a metric that only its declaration knows, from where it is computed to every reader.

Inserts one declaration each into the sources of `Step` and `Rollout`, lets the writers of a run record it, and prints as JSON what the
readers show.
"""

from __future__ import annotations

import importlib.util
import io
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from urllib.request import urlopen

STEP = """    # Learning
    surprise: Annotated[
        float | None, Metric("Mean surprise.", "nats a token", word="surprise", panel=True, plot=Plot("Learning", "Surprise"))
    ] = None
"""
ROLLOUT = """    stalls: Annotated[
        Mapping[str, int],
        Metric("Stalls since the controller started.", "stalls", key="engine", plot=Plot("Throughput", "Stalls of engines"), source="pool"),
    ] = {}
    started:"""


def declare(name: str, before: str, after: str) -> None:
    """Import a module with a changed source."""
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).read_text()
    assert source.count(before) == 1
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    exec(compile(source.replace(before, after), spec.origin, "exec"), module.__dict__)


def write(run_dir: Path) -> None:
    """Three steps of two optimizer updates each, and rollout records beside them."""
    from asyncmoe.queue.accounts import QueueStats
    from asyncmoe.rollout.recorder import Recorder
    from asyncmoe.telemetry.records import JsonLines
    from asyncmoe.telemetry.schema import METRICS
    from asyncmoe.trainer.records import step_record

    measured = {"loss": 0.5, "grad_norm": 1.0, "lr": 0.1, "rows": 9, "tokens": 4, "entropy": 0.1, "routing_mismatch": {}}

    def update(surprise: float | None) -> SimpleNamespace:
        return SimpleNamespace(**measured, figures={"surprise": surprise, "ages": {0: 4}})

    item = SimpleNamespace(
        group=0, episode=0, agent=0, branch=0, reward=1.0, steps=0, step_mean=0.0, teacher_gap=None, sampled=4, truncated=False
    )
    leased = SimpleNamespace(items=[item], queue_depth=1, dropped={}, lineage=0)
    recorder = Recorder(run_dir)
    with JsonLines(run_dir / METRICS) as metrics:
        for step in (1, 2, 3):
            begin = time.time()
            stats = QueueStats(0, 0, 0, 0, 0, 0, 0, {}, {}, {}, 0)
            pool = SimpleNamespace(generated_tokens=0, lost_tokens=0, recomputed_tokens=0, recalled_tokens=0, stalls={"engine.0": step})
            recorder.write(stats, ["engine.0"], pool)
            updates = [update(step), update(step + 1.0), update(None)]
            metrics.write(step_record(step, leased, "rl", updates, None, 0.0, (begin, begin, begin)))  # type: ignore[arg-type]
    recorder.close()


def shown(run_dir: Path) -> dict[str, object]:
    """What each reader shows."""
    import msgspec
    from rich.console import Console
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from asyncmoe.config import parse
    from asyncmoe.telemetry.follow import Follower
    from asyncmoe.telemetry.live import LiveView
    from asyncmoe.telemetry.prometheus import Prometheus
    from asyncmoe.telemetry.records import read_steps
    from asyncmoe.telemetry.report.run_page import page_of
    from asyncmoe.telemetry.schema import METRICS
    from asyncmoe.telemetry.screen import View, panel

    out = io.StringIO()
    config = parse(
        {"run": {"dir": str(run_dir), "steps": 3}, "model": {"path": "unused"}, "task": {"kind": "arithmetic"}, "warmup": {"steps": 0}}
    )
    with LiveView(config, Console(file=out, width=200)) as view:
        write(run_dir)
        view.refresh()
    sink = Prometheus(0)
    sink.feed(Follower(run_dir).poll())
    with urlopen(f"http://127.0.0.1:{sink.port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    sink.close()
    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    page = io.StringIO()
    Console(file=page, width=80).print(panel(View("x", 0, 3, read_steps(run_dir / METRICS))))
    return {
        "records": [json.loads(line)["surprise"] for line in (run_dir / METRICS).read_text().splitlines()],
        "lines": out.getvalue().splitlines(),
        "panel": page.getvalue(),
        "prometheus": text.splitlines(),
        "tensorboard": {tag: [event.value for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]},
        "report": msgspec.to_builtins(page_of([run_dir])[0].sections),
    }


if __name__ == "__main__":
    declare("asyncmoe.telemetry.learning_schema", "    # Learning\n", STEP)
    declare("asyncmoe.telemetry.rollout_schema", "    started:", ROLLOUT)
    print(json.dumps(shown(Path(sys.argv[1]))))
