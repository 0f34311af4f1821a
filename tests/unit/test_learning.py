"""The comparison of arms with a real model: which runs there are, what is kept of one, and what several say together."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from safetensors.torch import load_file, save_file

from asyncmoe import config as configuration
from asyncmoe.errors import DataError, EngineError, UserError
from asyncmoe.telemetry.rollout_schema import Evaluation
from asyncmoe.telemetry.run import RunRecords
from asyncmoe.telemetry.schema import Step
from benchmarks.commands import learning_
from benchmarks.learning import arms, changes, curves, figures, page, runner
from benchmarks.learning.summary import summary
from examples.real.tasks import Products, Records, Sums, number, record
from tests.float8 import quantise

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("arm", arms.ARMS, ids=lambda arm: arm.name)
def test_every_arm_is_a_valid_configuration_that_differs(arm: arms.Arm) -> None:
    config = configuration.load(ROOT / arms.CONFIGURATION, arms.overrides(arm, 1, Path("runs/x"), 60))
    assert (config.rollout.batch * arm.split, config.evaluation.every) == (32, 6 * arm.split)
    assert (config.run.seed, config.run.steps, config.model.path) == (1, 60 * arm.split, arm.model)
    different = {(other.model, other.settings, tuple(other.environment), other.trl, other.split) for other in arms.ARMS}
    assert len(different) == len(arms.ARMS)


def test_arms_are_named() -> None:
    assert [arm.name for arm in arms.chosen(["moe", "dense-sync"])] == ["moe", "dense-sync"]
    assert arms.chosen([]) == arms.ARMS
    with pytest.raises(UserError, match="--arms: got dense, expected some of dense-async, "):
        arms.chosen(["dense"])


def test_curves_count_samples_and_seconds_of_rl_time() -> None:
    steps = [
        Step(step=4, phase="warmup", time=90.0, step_seconds=5.0, version=0),
        Step(step=5, phase="rl", time=110.0, step_seconds=10.0, version=1, reward_mean=0.25, ages={0: 30, 1: 10}),
        Step(
            step=6, phase="rl", time=120.0, step_seconds=10.0, version=2, reward_mean=0.5, ages={1: 60}, routing_mismatch={0: 0.1, 1: 0.3}
        ),
    ]
    later = [Step(step=7, phase="rl", time=520.0, step_seconds=10.0, version=3, ages={0: 20})]
    evaluations = [
        Evaluation(time=101.0, seconds=1.0, version=0, questions=4, episodes=4, reward_mean=0.2, reward_stderr=0.1),
        Evaluation(time=515.0, seconds=1.0, version=2, questions=4, episodes=4, reward_mean=0.75),
        Evaluation(time=519.0, seconds=1.0, version=3, questions=4, episodes=4),
    ]
    found = curves.curves(RunRecords("r", [steps, later], [], [], evaluations), batch=8)
    assert found["samples"] == [8, 16, 24]
    assert found["seconds"] == [10.0, 20.0, 30.0]
    assert found["reward_mean"] == [0.25, 0.5, None]
    assert found["routing_mismatch"] == [None, 0.2, None]
    assert found["tokens_per_s"] == 4.0
    evaluated = {"samples": [0, 16], "seconds": [1.0, 25.0], "accuracy": [0.2, 0.75], "stderr": [0.1, None]}
    assert found["evaluations"] == evaluated


def test_bands_are_of_students_t() -> None:
    """1, 2 and 3: a mean of 2, a standard error of 1 / sqrt(3), and 4.303 of them to either side."""
    mean, half = curves.band([1.0, 2.0, 3.0])
    assert (mean, round(half, 3)) == (2.0, 2.484)
    assert curves.band([4.0]) == (4.0, 0.0)
    runs = [{"samples": [1, 2], "ess": [0.5, None]}, {"samples": [1, 2], "ess": [0.7, 0.9]}]
    assert [round(at, 6) for at, *_ in curves.together(runs, "ess")] == [1]


def test_where_a_curve_reaches_a_level() -> None:
    assert curves.reached([0, 100, 200], [0.1, 0.3, 0.7], 0.5) == pytest.approx(150)
    assert curves.reached([0, 100], [0.6, 0.3], 0.5) == 0
    assert curves.reached([0, 100], [0.1, 0.3], 0.5) is None


def test_what_is_recorded_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for model in (arms.DENSE, arms.MIXTURE):
        (tmp_path / model).mkdir(parents=True)
        (tmp_path / model / "config.json").write_text("{}")
    made: list[tuple[str, int]] = []

    def once(arm: arms.Arm, seed: int, steps: int) -> dict[str, object]:
        made.append((arm.name, seed))
        return {"evaluations": {"accuracy": [0.1]}}

    monkeypatch.setattr(runner, "ROOT", tmp_path)
    monkeypatch.setattr(runner, "_curves", once)
    two, results = arms.chosen(["dense-async", "moe"]), tmp_path / "results.json"
    runner.run(two[:1], (0,), 60, results, 1e9, lambda _: None)
    runner.run(two, (0, 1), 60, results, 1e9, lambda _: None)
    assert made == [("dense-async", 0), ("moe", 0), ("dense-async", 1), ("moe", 1)]
    runner.run(two, (2,), 60, results, 0.0, lambda _: None)
    assert [(one["arm"], one["seed"]) for one in runner.read(results)["runs"]] == made
    monkeypatch.setattr(runner, "ROOT", tmp_path / "empty")
    with pytest.raises(UserError, match=r"smollm2: got no model"):
        runner.run(two, (2,), 60, results, 1.0, lambda _: None)
    with pytest.raises(UserError, match="--minutes: got nan"):
        runner.run(two, (2,), 60, results, float("nan"), lambda _: None)


@pytest.mark.parametrize(("made", "most"), [(Sums, 0), (Products, 1), (Sums, -3)])
def test_a_task_of_no_questions_is_refused(made: type, most: int) -> None:
    with pytest.raises(ValueError, match=f"most: got {most}, expected at least"):
        made(most)


def test_sums_and_their_scorer() -> None:
    sums = Sums(9)
    assert len(sums) == 100
    assert (sums[37].prompt[1]["content"], sums[37].answer) == ("What is 3 + 7?", "10")
    products = Products(9)
    assert len(products) == 64
    assert (products[0].answer, products[63].prompt[-1]["content"], products[63].answer) == ("4", "What is 9 times 9?", "81")
    assert [number("", said, "1010") for said in ("1,010", "5 + 5 = 1010.", "1010 or 11", "ten", "")] == [1, 1, 0, 0, 0]


def test_records_and_their_scorer() -> None:
    from random import Random

    example = Records().draw(Random(1))
    assert record("", example.answer, example.answer) == 1.0
    answer = '{"name": "Ada", "age": 5, "likes": "tiger"}'
    said = ('{"name": "Ada", "age": "5", "likes": "tiger"}', '{"name": "Ada", "age": 5}', "Sure! " + answer, "[]")
    assert [record("", one, answer) for one in said] == [0.75, 0.0, 0.0, 0.0]


def test_the_page_has_a_row_and_a_curve_for_each_arm(tmp_path: Path) -> None:
    def one(arm: str, seed: int, last: float) -> dict[str, object]:
        evaluations = {"samples": [0, 640], "seconds": [0.0, 90.0], "accuracy": [0.1, last], "stderr": [0.1, 0.1]}
        return {"arm": arm, "seed": seed, "steps": 10, "samples": [640], "reward_mean": [0.4], "ess": [None], "entropy": [1.0],
                "train_infer_kl": [1e-4], "routing_mismatch": [None], "tokens_per_s": 40.0, "evaluations": evaluations}  # fmt: skip

    runs = [one("dense-async", seed, 0.4 + 0.1 * seed) for seed in range(3)] + [one("moe", 0, 0.3)]
    found = page.html({"runs": runs}, level=0.4)
    assert "<td>dense-async<td>engine and trainer at the same time" in found
    assert "<td>3<td>0.1<td>0.5 ± 0.25<td>" in found
    assert "<td>moe<td>the mixture" in found
    assert "<td>never<td>never<td>40" in found
    titles = [title for _, _, title in (*figures.DENSE, *figures.MIXTURE, *figures.OTHERS)]
    assert {title for title in titles if title in found} == set(titles[:3]), "a curve has two points; only accuracy has"
    page.pictures({"runs": runs}, tmp_path)
    for name in ("dense", "moe"):
        assert ElementTree.parse(tmp_path / f"learning-{name}.svg").getroot().tag.endswith("svg")


def test_bands_against_seconds_are_where_all_seeds_have_a_figure() -> None:
    """0 to 10 in 10 s and in 20 s: from 0 to 10 s, and there 10 and 5."""
    runs = [{"evaluations": {"seconds": [0.0, last], "accuracy": [0.0, 10.0]}} for last in (10.0, 20.0)]
    points = curves.against_seconds(runs, "accuracy")
    assert (points[0][:2], points[-1][:2]) == ((0.0, 0.0), (10.0, 7.5))
    assert points[-1][2] == pytest.approx(12.706 * 2.5)
    assert curves.against_seconds([{"seconds": [1.0], "ess": [1.0], "evaluations": {}}], "ess") == []


def test_changed_weights_are_counted_as_bfloat16(tmp_path: Path) -> None:
    one = {
        "model.embed_tokens.weight": torch.ones(4, 2),
        "model.layers.0.mlp.up_proj.weight": torch.ones(3),
        "model.norm.weight": torch.ones(2),
    }
    other = {name: value.clone() for name, value in one.items()}
    other["model.embed_tokens.weight"][0, 0] += 2**-7  # one step of bfloat16 at 1
    other["model.embed_tokens.weight"][1, 0] += 2**-10  # less than half of one
    other["model.layers.0.mlp.up_proj.weight"] *= 2
    for name, tensors in (("one", one), ("other", other)):
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors")
    assert changes.changed(tmp_path / "one", tmp_path / "other") == {"embedding": (1, 8), "experts": (3, 3), "norms": (0, 2)}
    found = changes.shares([tmp_path / "one", tmp_path / "other", tmp_path / "other"])
    assert found == {"embedding": [0.125, 0], "experts": [1, 0], "norms": [0, 0], "all": [0.3077, 0]}
    runs = [
        {"arm": "dense-async", "lr": rate, "mean": {"all": rate, "experts": rate}, "steps": {"all": [rate, rate]}} for rate in (0.1, 0.2)
    ]
    changes.picture(runs, tmp_path / "found.svg")
    assert "dense-async, experts" in (tmp_path / "found.svg").read_text()


@pytest.mark.parametrize("shape", [(128, 256), (130, 576), (3, 5)])
def test_weights_are_counted_as_the_float8_that_sglang_would_hold(tmp_path: Path, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    one = torch.randn(shape).to(torch.bfloat16)
    other = one.clone()
    other[0, 0] = 100.0  # the largest of its block: the scale changes, and with it most elements
    expected = [quantise(matrix) for matrix in (one, other)]
    for matrix, (coded, scales) in zip((one, other), expected, strict=True):
        found, steps = changes.float8(matrix)
        assert torch.equal(found, coded.view(torch.uint8))
        assert torch.equal(steps, scales.view(torch.int32))
    for name, matrix in (("one", one), ("other", other)):
        (tmp_path / name).mkdir()
        save_file({"model.layers.0.self_attn.q_proj.weight": matrix}, tmp_path / name / "model.safetensors")
    differing = int((expected[0][0].view(torch.uint8) != expected[1][0].view(torch.uint8)).sum())
    counted = changes.changed(tmp_path / "one", tmp_path / "other")
    assert counted["attention"] == (1, one.numel())
    assert counted[changes.FLOAT8] == (differing, one.numel())
    assert counted[changes.SCALES] == (1, expected[0][1].numel())
    assert changes.shares([tmp_path / "one", tmp_path / "other"])["all"] == [float(f"{1 / one.numel():.4g}")]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("model.layers.3.block_sparse_moe.experts.1.w2.weight", "experts"),
        ("model.layers.3.block_sparse_moe.gate.weight", "router"),
        ("model.layers.3.mlp.gate.weight", "router"),
        ("model.layers.3.mlp.gate_proj.weight", "experts"),
        ("model.layers.3.self_attn.q_norm.weight", "attention"),
        ("model.layers.3.input_layernorm.weight", "norms"),
        ("lm_head.weight", "embedding"),
        ("model.rotary", "other"),
    ],
)
def test_the_kind_of_a_tensor(name: str, kind: str) -> None:
    assert changes.kind_of(name) == kind


def told(arm: str, seed: int, accuracy: list[float], step: float) -> dict[str, object]:
    seconds = [step * number for number in range(1, 5)]
    evaluations = {"samples": [0, 100, 200], "seconds": [0.0, 10 * step, 20 * step], "accuracy": accuracy}
    return {
        "arm": arm,
        "seed": seed,
        "steps": 4,
        "samples": [25, 50, 75, 100],
        "seconds": seconds,
        "tokens_per_s": 40.0,
        "ess": [1.0, 0.5, None],
        "evaluations": evaluations,
    }


def test_arms_are_summed_up_and_compared_seed_by_seed() -> None:
    """The slower arm takes twice as long with each seed, and is better by 0.1 and 0.2: 0.15, and 12.706 * 0.05 to either side."""
    runs = [told("dense-async", seed, [0.0, 0.4 + 0.1 * seed, 0.8], 1.0 + seed) for seed in (0, 1)]
    runs += [told("dense-sync", seed, [0.0, 0.4 + 0.1 * seed, 0.9 + 0.1 * seed], 2.0 + 2 * seed) for seed in (1, 0)]
    found = summary(figures.by_arm(runs), level=0.4)
    one, other = found["dense-async"], found["dense-sync"]
    assert (one["seeds"], one["never"], one["before"], one["ess"], one["ess_least"]) == (2, 0, [0, 0], [0.75, 0], [0.5, 0])
    assert one["step_seconds"][0] == 1.5
    assert one["samples_to"][0] == 90.0, "100 and 80"
    assert one["training_to"][0] == 5.2, "4 steps of 1 s and 3.2 of 2 s"
    assert "against" not in one
    assert "kl" not in one
    assert other["against"] == {
        "seeds": 2,
        "after": [0.15, 0.6353],
        "curve": [0.075, 0.31765],
        "seconds_to": [2.0, 0.0],
        "training_to": [2.0, 0.0],
    }
    small = [told(f"moe-small-steps{more}", 0, [0.1, 0.2, last], 1.0) for more, last in (("", 0.5), ("-eta-64", 0.4))]
    both = summary(figures.by_arm([told("moe", 0, [0.1, 0.9, 0.9], 1.0), *small]), level=0.4)
    assert "against" not in both["moe-small-steps"]
    assert both["moe-small-steps-eta-64"]["against"]["after"] == [-0.1, 0.0]
    never = summary(figures.by_arm(runs), level=0.85)
    assert never["dense-async"]["never"] == 2
    assert "samples_to" not in never["dense-async"]
    assert "seconds_to" not in never["dense-sync"]["against"]


def test_the_summary_is_kept_with_the_records(tmp_path: Path) -> None:
    runs = [told("moe", 0, [0.1, 0.2, 0.3], 1.0)]
    runner.write(tmp_path / "results.json", runs, level={"accuracy": 0.5}, arms=summary(figures.by_arm(runs), 0.5))
    text = (tmp_path / "results.json").read_text()
    assert [line.partition(":")[0] for line in text.splitlines()] == [
        '{"level"',
        '"accuracy"',
        "},",
        '"arms"',
        '"moe"',
        "},",
        '"runs"',
        '{"arm"',
        "]}",
    ]
    assert runner.read(tmp_path / "results.json")["arms"]["moe"]["after"] == [0.3, 0.0]
    (tmp_path / "results.json").write_text(text[:100])
    with pytest.raises(DataError, match=r"results.json: got .*, expected results of bench learning"):
        runner.read(tmp_path / "results.json")


def test_seeds_are_different_numbers() -> None:
    assert arms.numbers("3,0") == (3, 0)
    for text in ("", "x", "1,1", "1,", "-1", "1 2"):
        with pytest.raises(UserError, match=r"--seeds: got .*, expected different whole numbers"):
            arms.numbers(text)


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for model in (arms.DENSE, arms.MIXTURE):
        (tmp_path / model).mkdir(parents=True)
        (tmp_path / model / "config.json").write_text("{}")
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    monkeypatch.setattr(runner, "RUNS", tmp_path / "build")
    return tmp_path


def test_a_run_that_was_stopped_says_so_and_a_whole_one_serves_other_results(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []

    def finish(run_dir: Path, command: list[str], environment: dict[str, str]) -> None:
        run_dir.mkdir(exist_ok=True)
        begun.append(run_dir.name)
        if len(begun) == 1:
            raise EngineError("interrupted")

    monkeypatch.setattr(runner, "finish", finish)
    monkeypatch.setattr(runner.configuration, "of_run", lambda run_dir: configuration.load(ROOT / arms.CONFIGURATION, ["run.dir=x"]))
    monkeypatch.setattr(runner.curves, "of_run", lambda run_dir, batch: told("dense-async", 0, [0.1, 0.6, 0.8], 1.0))
    (arm,) = arms.chosen(["dense-async"])
    with pytest.raises(EngineError):
        runner.run([arm], [3], 5, models / "a.json", 1e9, lambda _: None)
    for results in ("a.json", "b.json"):
        runner.run([arm], [3], 5, models / results, 1e9, lambda _: None)
        (one,) = runner.read(models / results)["runs"]
        assert one["resumed"] is True
        assert "seconds_to" not in summary({"dense-async": [one]}, 0.5)["dense-async"]
    assert begun == ["dense-async-3-5"] * 2
    runner.run([arm], [4], 5, models / "b.json", 1e9, lambda _: None)
    assert "resumed" not in runner.read(models / "b.json")["runs"][1]


def test_what_cannot_be_kept_or_run_is_refused_before_anything_runs(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "finish", lambda *_: pytest.fail("a run has begun"))
    (models / "file").write_text("")
    for place in (models, models / "file" / "x.json", models / "none" / "x.json", Path("/proc/x.json")):
        with pytest.raises(UserError, match=r"--json: got .*, expected a file"):
            runner.run(arms.chosen(["dense-async"]), [0], 5, place, 1e9, lambda _: None)
    monkeypatch.setattr(runner, "TRL", models / "trl")
    with pytest.raises(UserError, match=r"got no TRL, expected its packages; make bench-trl"):
        runner.run(arms.chosen(["dense-trl"]), [0], 5, models / "a.json", 1e9, lambda _: None)
    (models / arms.MIXTURE / "config.json").unlink()
    runner.run(arms.chosen([]), [0], 5, models / "a.json", 0.0, lambda _: None)
    with pytest.raises(UserError, match=r"smollm2-moe: got no model, expected one for moe; python examples/real/make_mixture.py"):
        changes.of_arm("moe")
    with pytest.raises(UserError, match=r"--page: got .*, which is --json too"):
        learning_(models / "a.json", page=models / "a.json", minutes=0.0)
    for text in ("x", "", "2", "1e-5,"):
        with pytest.raises(UserError, match=r"--rates: got "):
            arms.rates(text)


def test_changes_are_measured_once_for_each_rate(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[float] = []

    def measure(subject: changes.Subject, rate: float, steps: int) -> dict[str, list[float]]:
        assert subject.name == "dense-async"
        measured.append(rate)
        return {"all": [0.9, 0.9, rate, rate]}

    monkeypatch.setattr(changes, "measure", measure)
    for rates in ((1e-5,), (1e-5, 1e-6)):
        found = changes.run(models / "changes.json", changes.of_arm("dense-async"), 4, rates)
    assert measured == [1e-5, 1e-6]
    assert [one["mean"]["all"] for one in found] == [1e-5, 1e-6]


def test_changes_of_a_configuration_begin_with_its_model_or_after_its_warm_up(models: Path, tmp_path: Path) -> None:
    demo = changes.of_configuration(ROOT / "examples" / "demo.yaml", ["warmup.steps=30"])
    assert (demo.name, demo.start, demo.warmup, demo.settings) == ("demo", None, 30, ("warmup.steps=30",))
    given = ["model.path=none"]
    with pytest.raises(UserError, match=r"model.path: got none, which is not there, expected a model, or a configuration with a warm-up"):
        changes.of_configuration(ROOT / "examples" / "real" / "sums.yaml", given)
    (tmp_path / "config.json").write_text("{}")
    assert changes.of_configuration(ROOT / "examples" / "real" / "sums.yaml", [f"model.path={tmp_path}"]).start == tmp_path


def test_dithered_weights_round_to_those_that_they_were(tmp_path: Path) -> None:
    values = torch.randn(64, 64).to(torch.bfloat16)
    values[0, :4] = torch.tensor([1.0, -2.0, 0.0, 1e-30])
    (tmp_path / "model").mkdir()
    save_file({"a": values}, tmp_path / "model" / "model.safetensors")
    (tmp_path / "model" / "config.json").write_text("{}")
    subject = changes.Subject("own", Path("own.yaml"), ("a=b",), tmp_path / "model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(changes, "RUNS", tmp_path)
        found = subject.from_anywhere()
    assert (found.name, found.start) == ("own-dithered", tmp_path / "dithered-model")
    assert found.settings == ("a=b", f"model.path={found.start}", "trainer.dtype=float32")
    assert (tmp_path / "dithered-model" / "config.json").is_file()
    moved = load_file(tmp_path / "dithered-model" / "model.safetensors")["a"]
    assert moved.dtype == torch.float32
    assert torch.equal(moved.to(torch.bfloat16), values)
    within = (moved - values.float()) / torch.exp2((torch.frexp(values.float()).exponent - 8).float())
    assert -0.5 <= float(within.min()) < -0.4, "evenly between the middles of the intervals"
    assert 0.4 < float(within.max()) <= 0.5
    with pytest.raises(UserError, match="--dither: got own, whose model the warm-up makes"):
        changes.Subject("own", Path("own.yaml"), (), None, 3).from_anywhere()
