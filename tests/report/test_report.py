"""Tests of the report: for the files of every kind of run, in every state, and as a browser shows it."""

import base64
import io
import json
import os
import re
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest

from mcore_rl.cli.report import write_report
from mcore_rl.report.page import MAX_POINTS, findings, left_out, page, phases, sample_rows, sections, thinned
from mcore_rl.report.runs import Series, read_runs
from mcore_rl.run.directory import REPORT_MARK, RunDirectory
from mcore_rl.run.identity import RunIdentity

HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>&lt;\u202e"


def drawn_sections(runs):
    return sections(runs, left_out(runs))


def write_run(path, metrics=(), samples=(), config="", state="ended"):
    path.mkdir(parents=True, exist_ok=True)
    for name, lines in (("metrics.jsonl", metrics), ("samples.jsonl", samples)):
        (path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    (path / "config.yaml").write_text(config)
    if state != "ended":
        pid = os.getpid() if state == "going on" else 2**22 - 1
        (path / "run.lock").write_text(json.dumps({"pid": pid, "host": os.uname().nodename}) + "\n")
    return path


def sample(step, answer, reward=1.0, prompt="2+2=", **more):
    messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    return {"step": step, "reward": reward, "messages": messages, "error": None, **more}


def grpo(path, steps=30, state="ended"):
    def line(step):
        spent = {"generation_seconds": 0.5, "training_seconds": 0.25, "step_seconds": 1.0}
        mismatch = {"token_mult_prob_error": 1.001 + 0.5 * (step == 7), "skipped_update": float(step in (3, 4))}
        held_out = {"validation_reward_mean": 0.1 * step} if step % 10 == 0 else {}
        loss = float("nan") if step == 5 else 1 / step
        return {"step": step, "loss": loss, "reward_mean": step / 50, "num_tokens": 100, HOSTILE: 1.0, **spent,
                **mismatch, **held_out}  # fmt: skip

    samples = [sample(step, HOSTILE if step == 2 else f"answer {step}", step / 7) for step in range(1, steps + 1)]
    samples[-1] |= {"error": "judge <b>timed out</b>", "rewards": {"format": 0.5}}
    config = "parallel: {tensor_model_parallel_size: 2}\ngeneration: {max_token_mult_prob_error: 1.5}\nseed: 1\n"
    return write_run(path, map(line, range(1, steps + 1)), samples, config, state)


def dpo(path):
    line = {"loss": 0.6931, "rewards_chosen_mean": 1.25, "rewards_rejected_mean": -0.5, "accuracy": 0.75, "lr": 3e-7}
    return write_run(path, [{"step": step, **line, "step_seconds": 0.5} for step in (1, 2)], config="seed: 2\n")


def titles(runs):
    return {section.title: [chart.title for chart in section.charts] for section in drawn_sections(runs)}


def test_curves_stand_in_groups(tmp_path):
    found = titles(read_runs([grpo(tmp_path / "a"), dpo(tmp_path / "b")]))
    assert found["Rewards"] == ["reward", "rewards of pairs", "margin", "accuracy"]
    assert found["Mismatch between sampler and trainer"] == ["token_mult_prob_error"]
    assert found["Speed"] == ["seconds of a step, a", "seconds of a step, b"]
    assert {"num_tokens", "skipped_update"} <= set(found["Other"]), "nothing that was measured is left out"
    (margin,) = (c for s in drawn_sections(read_runs([tmp_path / "b"])) for c in s.charts if c.title == "margin")
    assert list(margin.figure.data[0].y) == [1.75, 1.75]


def test_curves_that_are_zero_or_equal_to_another_are_named_and_not_drawn(tmp_path):
    def line(step, **more):
        speed = {"tokens_per_second": 2.0 * step, "training_tokens_per_second": 2.0 * step}
        of_loss = {"loss": 1 / step, "nll_loss": 1 / step, "sft_loss": 0.0, "grad_norm": 1 / step}
        return {"step": step, **of_loss, **speed, "num_failed": 0, **more}

    first = write_run(tmp_path / "a", [line(step) for step in (1, 2)])
    runs = read_runs([first])
    assert left_out(runs) == {
        "nll_loss": "loss", "sft_loss": "", "training_tokens_per_second": "tokens_per_second", "num_failed": "",
    }  # fmt: skip
    drawn = {trace.name for section in drawn_sections(runs) for chart in section.charts for trace in chart.figure.data}
    assert drawn == {"loss", "grad_norm", "tokens_per_second"}, "grad_norm is in another section than the loss"
    text = page(runs)
    assert "Always 0: sft_loss, num_failed." in text
    assert "Equal to another curve: nll_loss (as loss), training_tokens_per_second (as tokens_per_second)." in text
    second = write_run(tmp_path / "b", [line(1), line(2, nll_loss=9.0, num_failed=1)])
    assert list(left_out(read_runs([first, second]))) == ["sft_loss", "training_tokens_per_second"]
    assert "Curves left out" not in page(read_runs([dpo(tmp_path / "c")])), "all of its curves are drawn"


def test_charts_explain_their_curves(tmp_path):
    lines = [{"step": step, "validation_loss": step / 2, "loss": float(step), "own": 1.0} for step in (1, 2)]
    charts = {
        chart.title: chart for s in drawn_sections(read_runs([write_run(tmp_path / "a", lines)])) for chart in s.charts
    }
    ((names, meaning),) = charts["loss"].meanings
    assert names == "loss" and meaning.startswith("Value that the optimizer minimises") and "Unit: nats" in meaning
    assert not charts["own"].meanings, "a metric of another program"
    assert "Value that the optimizer minimises" in page(read_runs([tmp_path / "a"]))


def test_phases_add_up_to_the_step(tmp_path):
    (run,) = read_runs([grpo(tmp_path / "a", steps=1000)])
    chart = phases(run, "")
    assert [trace.name for trace in chart.figure.data] == ["generation", "training", "other"]
    assert np.allclose(sum(trace.y for trace in chart.figure.data), 1.0)
    assert chart.note == "1,000 steps: means of 300 stretches"


def test_what_is_to_be_looked_at(tmp_path):
    (run,) = read_runs([grpo(tmp_path / "a", state="killed")])
    with open(tmp_path / "a" / "metrics.jsonl", "a") as file:
        file.write('{"step": 31, "lo')
    (tmp_path / "a" / "stacks").mkdir()
    (tmp_path / "a" / "stacks" / "rank_00000.txt").write_text("rank 0, step 30: training, since 12:00\nFile …")
    (run,) = read_runs([tmp_path / "a"])
    said = list(findings(run))
    assert said[0].startswith("the run was killed")
    assert "stacks/ tells what each of 1 ranks was doing (step 30: training, since 12:00)" in said[1]
    assert "loss is NaN or infinite at step 5" in said
    assert "no update at 2 steps (3, 4): there was nothing to learn from" in said
    assert "token_mult_prob_error is above 1.4 at step 7 (generation.max_token_mult_prob_error=1.5)" in said
    assert said[-1] == "metrics.jsonl: its last line is incomplete and left out here"
    assert list(findings(read_runs([dpo(tmp_path / "b")])[0])) == []
    assert read_runs([grpo(tmp_path / "c", state="going on")])[0].state == "going on"


def test_a_hundred_thousand_steps(tmp_path):
    values = np.sin(np.arange(100_000) / 1000)
    values[54_321], values[99_998] = 40.0, np.nan
    steps, shown = thinned(Series(np.arange(100_000), values))
    assert len(steps) <= MAX_POINTS and (np.diff(steps) > 0).all()
    assert (steps[np.nanargmax(shown)], np.nanmax(shown)) == (54_321, 40.0), "a spike stays"
    assert np.nanmin(shown) == np.nanmin(values)


@pytest.mark.exhaustive
def test_a_long_run_in_seconds_and_megabytes(tmp_path):
    lines = ({"step": n, **{f"m{k}": n * 0.1 + k for k in range(40)}, "step_seconds": 0.1} for n in range(100_000))
    write_run(tmp_path / "a", lines, (sample(n, "x" * 9000) for n in range(0, 100_000, 10)))
    started = time.monotonic()
    text = write_report([tmp_path / "a"], tmp_path / "a.html").read_text()
    assert time.monotonic() - started < 40
    assert len(text) < 16e6
    assert "100,000 steps: of every 200 or so the least and the greatest value are drawn" in text
    assert "100 samples, of 100 of 10,000 steps that have some" in text
    assert "… (5,000 more characters)" in text


def test_samples_of_runs_side_by_side(tmp_path):
    a = write_run(tmp_path / "a", samples=[sample(1, "4"), sample(1, "5", 0.0), sample(2, "6", prompt="3+3=")])
    b = write_run(tmp_path / "b", samples=[sample(1, "four", 0.5)])
    rows = sample_rows(read_runs([a, b]))
    shown = [[cell and (cell["messages"][0]["text"], cell["reward"]) for cell in row.cells] for row in rows]
    assert shown == [[("4", "1"), ("four", "0.5")], [("5", "0"), None], [("6", "1"), None]]
    assert [row.prompt[0]["text"] for row in rows] == ["2+2=", "2+2=", "3+3="]


def turn(parent, row, *messages, **more):
    return {"parent": parent, "messages": messages, "prompt_tokens": 9, "sampled_tokens": 4, "ended": True, "row": row,
            **more}  # fmt: skip


def session(answer="5"):
    """A tool call, two answers to its result, and a second context, whose response did not arrive."""
    asked, system = {"role": "user", "content": "2+3?"}, {"role": "system", "content": "Be short."}
    function = {"name": "add", "arguments": {"a": 2}}
    called = {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [{"function": function}]}
    result = {"role": "tool", "content": "5"}
    return [
        turn(None, 0, system, asked, called),
        turn(0, 0, result, {"role": "assistant", "content": answer}),
        turn(
            0, 1, {"role": "tool", "content": "six"}, {"role": "assistant", "content": "6"}, ended=False, extends=False
        ),
        turn(None, None, system, asked, {"role": "user", "content": "And?"}, {"role": "assistant", "content": HOSTILE}),
    ]


def test_sessions_are_trees(tmp_path):
    """Two sessions of a prompt are side by side; each has its contexts, and turns with several continuations."""
    samples = [sample(1, "6", session=session("5")), sample(1, "6", session=session("4")), sample(1, "7", prompt="?")]
    run = write_run(tmp_path / "a", samples=samples)
    first, other = sample_rows(read_runs([run]))
    assert [message["text"] for message in first.prompt] == ["Be short.", "2+3?"] and len(first.cells) == 2
    root, second = first.cells[0]["session"]
    assert root[0].context == [] and root[0].said == [("thought", "Hm."), ("call", '→ add({"a": 2})')]
    assert [root[1].said[0][1], *(branch[0].said[0][1] for branch in root[0].branches)] == ["6", "5"]
    assert root[0].facts == "turn 1 · 9 + 4 tokens · row 1"
    assert root[1].facts == "turn 3 · 9 + 4 tokens · earlier turns rewritten · row 2 · cut off"
    assert len(second[0].context) == 3 and not second[0].is_trained and "not trained" in second[0].facts
    assert len(other.cells) == 1 and not other.cells[0]["session"]
    text = page(read_runs([run]))
    assert (
        text.count('class="branch"') == 2 and "window.hacked = 1</script>" not in text.split('id="samples"')[1][:9000]
    )
    wrong = [turn(None, "0", {}), turn(None, 0, {}, prompt_tokens=None)]
    for broken in ([{"messages": []}], "x", [1], [{"messages": [1], "parent": 7}], wrong[:1], wrong[1:]):
        assert page(read_runs([write_run(tmp_path / "b", samples=[sample(1, "6", session=broken)])]))


def test_sessions_with_many_branches_stay_narrow(tmp_path):
    """The longest continuation goes on in the same column; branches of 1,000 turns are nested a few times."""
    drawn, asked = np.random.default_rng(0), {"role": "user", "content": "Q"}
    said = {"role": "assistant", "content": "A"}
    chains = [turn(None, 0, asked, said)] + [turn(max(0, n - 2 + n % 2), 0, said) for n in range(1, 400)]
    trees = [turn(None, 0, asked, said)] + [turn(int(drawn.integers(n)), 0, said) for n in range(1, 1000)]

    def depth(views):
        return 1 + max((depth(branch) for view in views for branch in view.branches), default=0)

    for turns, deepest in ((chains, 2), (trees, 10)):
        (row,) = sample_rows(read_runs([write_run(tmp_path / "a", samples=[sample(1, "6", session=turns)])]))
        (views,) = row.cells[0]["session"]
        assert depth(views) <= deepest
        assert page(read_runs([tmp_path / "a"])).count('class="turn"') == len(turns)


def test_sessions_that_are_not_trained_say_so(tmp_path):
    """Samples of a prompt are side by side, also if their first requests differ."""
    other = [turn(None, 0, {"role": "user", "content": "It is 10:01. 2+3?"}, {"role": "assistant", "content": "5"})]
    samples = [
        sample(1, "6", session=session()),
        sample(1, "6", reward=None, session=other, error="down"),
        sample(2, "6", session=other, advantage=None),
    ]
    for one, number in zip(samples, (3, 3, 4), strict=True):
        one["prompt"] = number
    first, last = sample_rows(read_runs([write_run(tmp_path / "a", samples=samples)]))
    facts = [[context[0].facts for context in cell["session"]] for cell in (*first.cells, *last.cells)]
    assert [texts[0] for texts in facts] == [
        "turn 1 · 9 + 4 tokens · row 1",
        "turn 1 · 9 + 4 tokens · row 1 · not trained",
        "turn 1 · 9 + 4 tokens · row 1 · not trained",
    ]
    assert first.cells[1]["session"][0][0].context and not first.cells[0]["session"][0][0].context


def test_text_of_samples_stays_text(tmp_path):
    written = page(read_runs([grpo(tmp_path / "<i>a", state="killed")]))
    plain = written[: written.rindex('<script type="application/json"')]
    assert "<script" not in plain and "<img" not in plain and "<i>" not in plain and "<b>" not in plain
    assert "&lt;/script&gt;&lt;script&gt;window.hacked" in plain
    (figures,) = re.findall(r'<script type="application/json" id="figures">(.*?)</script>', written, re.DOTALL)
    assert len(json.loads(figures)) == len(re.findall('class="chart"', plain))
    lone = write_run(tmp_path / "b", samples=[sample(1, "\ud83d")])
    assert "answer" not in write_report([lone], tmp_path / "b.html").read_text()


@pytest.mark.parametrize("state", ["nothing", "empty", "one cut line", "odd values"])
def test_runs_with_little_in_them(state, tmp_path):
    run = write_run(tmp_path / "run")
    if state == "nothing":
        (run / "samples.jsonl").unlink()
        (run / "config.yaml").unlink()
    (run / "metrics.jsonl").write_text('{"step": 1, "loss"' if state == "one cut line" else "")
    if state == "odd values":
        (run / "metrics.jsonl").write_text('{"step": 1, "loss": null, "x": "text", "y": Infinity, "z": {}}\n')
        (run / "samples.jsonl").write_text('{"step": 1}\n{"step": 1, "messages": [1], "rewards": null}\n')
    text = write_report([run], run / "report.html").read_text()
    assert ("no step has been finished" in text) == (state != "odd values")
    assert write_report([run], run / "report.html"), "an earlier report is replaced"


def call(*arguments):
    command = [sys.executable, "-m", "mcore_rl", "report", *arguments]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=60)


def test_samples_show_advantage_and_ground_truth(tmp_path):
    shown = {**sample(1, "it is 4"), "advantage": -0.25, "ground_truth": "4 <b>"}
    write_run(tmp_path / "a", [{"step": 1, "loss": 1.0}], [shown])
    text = write_report([tmp_path / "a"], tmp_path / "a.html").read_text()
    assert re.search(r"reward [\d.]+.* · advantage -0.25 · ground truth 4 &lt;b&gt;</p>", text)


def test_samples_show_small_copies_of_images(tmp_path):
    from PIL import Image

    paths = [tmp_path / "picture <1>.png", tmp_path / "missing.png"]
    Image.new("RGB", (400, 200), "red").save(paths[0])
    parts = [{"type": "text", "text": "see "}, *({"type": "image", "image": str(path)} for path in paths)]
    run = write_run(tmp_path / "a", samples=[sample(1, "red", prompt=parts)])
    (message,) = sample_rows(read_runs([run]))[0].prompt
    assert message["text"] == "see [picture <1>.png][missing.png]"
    (url,) = message["images"]
    shown = Image.open(io.BytesIO(base64.b64decode(url.removeprefix("data:image/png;base64,"))))
    assert shown.size == (96, 48) and shown.getpixel((0, 0)) == (255, 0, 0)
    text = write_report([run], tmp_path / "a.html").read_text()
    assert text.count(f'<img src="{url}"') == 1 and "picture &lt;1&gt;.png" in text


def test_a_page_is_small(tmp_path):
    """The page holds all that it needs, with the small build of the library of charts."""
    assert len(write_report([grpo(tmp_path / "a")], tmp_path / "a.html").read_bytes()) < 1.5e6


@pytest.mark.long
def test_the_command(tmp_path):
    run = dpo(tmp_path / "run")
    done = call(run)
    assert (done.returncode, done.stdout) == (0, f"{run / 'report.html'}\n"), done.stderr
    (tmp_path / "mine.html").write_text("mine")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "metrics.jsonl").write_text("[1]\n")
    for arguments, message in [
        ((tmp_path / "nowhere",), f"{tmp_path}/nowhere: is not the output directory of a run"),
        ((tmp_path,), f"{tmp_path}: has no metrics.jsonl; give the output_dir of a run"),
        ((tmp_path / "broken",), "broken/metrics.jsonl: cannot be read (a line is not an object with an integer step)"),
        (
            (run, "--output", tmp_path / "mine.html"),
            "mine.html: exists and was not written by mcore-rl report; choose another file",
        ),
        ((run, "--output", tmp_path / "no" / "where.html"), "where.html: cannot be written (No such file"),
        ((run, "--output", run / "hf" / "a.html"), "the run in"),
    ]:
        done = call(*arguments)
        assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert (tmp_path / "mine.html").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken", "mine.html", "run"]


@pytest.mark.parametrize("text", ["mine", REPORT_MARK])
def test_a_run_that_starts_afresh_removes_only_a_report(text, tmp_path):
    identity = RunIdentity("sft", {}, "", "", {}).to_json()
    (write_run(tmp_path / "run") / "run.json").write_text(identity)
    (tmp_path / "run" / "report.html").write_text(text)
    RunDirectory(tmp_path / "run").clear()
    assert (tmp_path / "run" / "report.html").exists() == (text == "mine")


def test_a_run_has_one_color_and_a_metric_one_dash(tmp_path):
    one, two = read_runs([dpo(tmp_path / "a"), dpo(tmp_path / "b")])
    charts = {chart.title: chart.figure.data for section in drawn_sections([one, two]) for chart in section.charts}
    curves = [(trace.name.partition(": "), trace.line) for trace in charts["rewards of pairs"]]
    assert len(curves) == 4 and len({(line.color, line.dash) for _, line in curves}) == 4
    for place in (0, 2):
        kinds = {(name[place], line.color if place == 0 else line.dash) for name, line in curves}
        assert len(kinds) == 2, kinds
    alone = {chart.title: chart.figure.data for section in drawn_sections([one]) for chart in section.charts}
    assert len({trace.line.color for trace in alone["rewards of pairs"]}) == 2


def test_validation_has_the_color_of_its_curve(tmp_path):
    values = ("reward_mean", "validation_reward_mean", "validation_math/reward_mean", "reward_positive_fraction")
    pair = ("rewards_rejected_mean", "rewards_chosen_mean", "validation_rewards_chosen_mean")
    numbers = {name: place / 8 for place, name in enumerate((*values, *pair), 1)}
    lines = [{"step": step, **numbers, "accuracy": 1.0} for step in (1, 2)]
    (run,) = read_runs([write_run(tmp_path / "a", lines)])
    charts = {chart.title: chart.figure.data for section in drawn_sections([run]) for chart in section.charts}
    training, *validation = charts["reward"]
    assert len(validation) == 2 and {trace.line.color for trace in validation} == {training.line.color}
    assert {trace.line.dash for trace in validation} == {"dot"} and training.line.dash == "solid"
    assert len({trace.marker.symbol for trace in validation}) == 2
    colors = {trace.name: trace.line.color for trace in charts["rewards of pairs"]}
    assert colors["validation_rewards_chosen_mean"] == colors["rewards_chosen_mean"] != colors["rewards_rejected_mean"]
    assert [trace.name for trace in charts["accuracy"]] == ["accuracy"]
    assert [trace.name for trace in charts["fraction of positive rewards"]] == ["reward_positive_fraction"]


@pytest.mark.parametrize(
    ("trainer", "state", "steps"),
    [
        ("{max_steps: 40, max_epochs: null}", "stopped", "30 of 40"),
        ("{max_steps: 30}", "ended", "30 of 30"),
        ("{max_steps: 40, max_epochs: 1}", "ended", "30"),
        ("{max_epochs: 1}", "ended", "30"),
    ],
)
def test_a_run_that_stopped_says_so(trainer, state, steps, tmp_path):
    path = grpo(tmp_path / "a")
    (path / "config.yaml").write_text(f"trainer: {trainer}\n")
    (run,) = read_runs([path])
    assert run.state == state
    assert any("the run stopped before its last step: 30 of 40 steps" in said for said in findings(run)) == (
        state == "stopped"
    )
    text = page([run])
    assert f">{state}</span>" in text and f"<dd>{steps}</dd>" in text


# ------------------------------------------------------------------ as a browser shows it


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    installed = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chromium-browser"))), None)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=installed, args=["--no-sandbox"], timeout=60_000)
        yield browser
        browser.close()


def shows(tab, scheme, seconds=10):
    """Whether page and charts come to be of these colours; charts are drawn again a moment after the page."""
    deadline = time.monotonic() + seconds
    while contrast(tab) != scheme and time.monotonic() < deadline:
        tab.wait_for_timeout(50)
    return contrast(tab) == scheme


def contrast(tab):
    """Return `light` for dark letters in charts on a light page, `dark` for the opposite."""
    background, ink = (
        tab.evaluate(f"Math.max(...getComputedStyle({it}).{what}.match(/[0-9]+/g).slice(0, 3).map(Number))")
        for it, what in (("document.body", "backgroundColor"), ("document.querySelector('.chart .xtick text')", "fill"))
    )
    return {(True, False): "light", (False, True): "dark"}.get((background > 200, ink > 180))


COVERED = """[...document.querySelectorAll(".chart")].flatMap((chart) => {
    const box = (part) => part.getBoundingClientRect(), whole = box(chart);
    const plot = box(chart.querySelector(".nsewdrag"));
    const names = [...chart.querySelectorAll(".legendtext")].filter(
        (name) => box(name).right > whole.right || box(name).bottom > whole.bottom || box(name).top < plot.bottom);
    return names.map((name) => name.textContent);
})"""


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1600])
def test_in_a_browser(width, scheme, browser, tmp_path):
    runs = [grpo(tmp_path / "a", state="killed"), dpo(tmp_path / "b")]
    output = write_report(runs, tmp_path / "report.html")
    tab = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    trouble, asked = [], []
    tab.on("console", lambda message: trouble.append(message.text) if message.type in ("error", "warning") else None)
    tab.on("pageerror", lambda error: trouble.append(str(error)))
    tab.on("request", lambda request: asked.append(request.url))
    tab.goto(output.as_uri())
    tab.wait_for_function("[...document.querySelectorAll('.chart')].every((c) => c.querySelector('svg.main-svg'))")
    charts = tab.locator(".chart")
    assert charts.count() == sum(len(section.charts) for section in drawn_sections(read_runs(runs)))
    for box in (charts.nth(n).bounding_box() for n in range(charts.count())):
        assert 250 < box["width"] <= width and 280 < box["height"] < 800
    assert tab.evaluate(COVERED) == [], "no name is cut off"
    assert not tab.locator(".modebar-btn").count(), "no toolbar lies over a chart"
    steps = tab.locator(".chart .xtick text").all_text_contents()
    assert steps and all(re.fullmatch(r"[\d,]+", step) for step in steps)
    assert tab.locator(".chart .scatterlayer .trace").count() >= charts.count()
    assert tab.evaluate("document.documentElement.scrollWidth") <= width, "nothing is wider than the screen"
    assert tab.evaluate("window.hacked") is None
    assert shows(tab, scheme)
    rows = tab.locator(".row:visible")
    assert rows.count() == 30
    tab.fill("#search", "ANSWER 17")
    assert rows.count() == 1 and tab.locator("#found").inner_text() == "1 of 30"
    tab.fill("#search", "window.hacked")
    assert rows.count() == 1 and "</script>" in rows.inner_text()
    other = "light" if scheme == "dark" else "dark"
    tab.emulate_media(color_scheme=other)
    assert shows(tab, other)
    assert not trouble
    assert all(url.startswith(("file:", "data:")) for url in asked)
    tab.close()


@pytest.mark.browser
@pytest.mark.parametrize("width", [400, 1600])
def test_sessions_in_a_browser(width, browser, tmp_path):
    """Branches are indented, long contexts are folded, and the search finds texts in all of them."""
    samples = [sample(1, "6", session=session("5")), sample(1, "6", session=session("4"), reward=0.0)]
    output = write_report([write_run(tmp_path / "a", samples=samples)], tmp_path / "report.html")
    tab = browser.new_page(viewport={"width": width, "height": 900})
    tab.goto(output.as_uri())
    cells = tab.locator(".cell")
    left, right = (cells.nth(n).bounding_box() for n in range(2))
    assert (left["y"] == right["y"]) == (width > 700), "side by side where there is room"
    turns = cells.nth(0).locator(".turn")
    edges = [turns.nth(n).bounding_box()["x"] for n in range(4)]
    assert edges[0] == edges[2] == edges[3] < edges[1]
    assert not tab.get_by_text("And?").first.is_visible()
    cells.nth(0).locator("summary").click()
    assert tab.get_by_text("And?").first.is_visible()
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.evaluate("window.hacked") is None
    tab.fill("#search", "six")
    assert tab.locator(".row:visible").count() == 1
    tab.close()
