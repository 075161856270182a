"""The report is one file that needs nothing else, whatever the run holds."""

from __future__ import annotations

import re
import threading
from html.parser import HTMLParser
from pathlib import Path

import pytest

from april.reporting.report import follow, write_report
from tests.reporting.conftest import simulate, write_run

VOID = {"meta", "link", "br", "hr", "img", "input", "line", "path", "rect", "circle"}


class Checker(HTMLParser):
    """Every tag is closed; collects what the page would fetch, and its text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.text: list[str] = []
        self.tags: dict[str, int] = {}

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags[tag] = self.tags.get(tag, 0) + 1
        if tag not in VOID:
            self.open.append(tag)
        self.fetched += [value for name, value in attributes if name in ("src", "href") and value and value[0] != "#"]

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags[tag] = self.tags.get(tag, 0) + 1

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def page(directory: Path) -> Checker:
    checker, html = Checker(), write_report(directory).read_text()
    checker.feed(html)
    assert html.count("<table") == html.count('<div class="scroll"><table'), "a wide table scrolls by itself"
    checker.close()
    assert not checker.open
    assert not [url for url in checker.fetched if not url.startswith("data:")]
    return checker


def test_several_engines_have_a_section_with_their_weight_updates(tmp_path: Path) -> None:
    metrics, traces, summary = simulate(steps=4)
    for record in metrics:
        if record["step"]:
            record |= {"engines": 3, "engines_ready": 2, "nodes": 2, "update_seconds": 0.4, "update_bytes": 2_000_000}
            record |= {"engines_lost": 1}
    page = write_report(write_run(tmp_path / "many", metrics, traces, summary)).read_text()
    assert "Engines and weight updates" in page
    assert "Losses of engines in this run: 4;" in page
    alone = write_report(write_run(tmp_path / "alone", *simulate(steps=4))).read_text()
    assert "Engines and weight updates" not in alone


def test_a_run_is_shown_with_all_its_plots(tmp_path: Path) -> None:
    metrics, traces, summary = simulate()
    checker = page(write_run(tmp_path, metrics, traces, summary))
    text = " ".join(checker.text)
    for heading in ("Reward", "Response lengths", "One step, sample by sample", "Tokens by policy age"):
        assert heading in text
    for heading in ("Throughput", "Staleness", "Time per phase", "Resolved recipe"):
        assert heading in text
    assert checker.tags["svg"] >= 8
    assert "accuracy 0.510 → 0.9" in text


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_runs_without_steps_have_a_report(tmp_path: Path, steps: int) -> None:
    metrics, traces, summary = simulate(steps=steps)
    page(write_run(tmp_path / "with", metrics, traces, summary))
    page(write_run(tmp_path / "without", metrics, traces, None))
    page(write_run(tmp_path / "empty", [], [], None))


def test_a_run_without_evaluations_has_a_report(tmp_path: Path) -> None:
    metrics, traces, summary = simulate(steps=4)
    for record in metrics:
        record.pop("accuracy", None)
        record.pop("eval_reward", None)
    assert "not evaluated" in page(write_run(tmp_path, metrics[1:], traces, summary)).text


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    metrics, traces, summary = simulate(steps=2)
    summary["recipe"]["task"] = {"name": "</script><script>alert(1)</script><img src=http://example.org/x>"}
    page(write_run(tmp_path / "<b>run", metrics, traces, summary))
    html = (tmp_path / "<b>run" / "report.html").read_text()
    assert "<script>alert" not in html
    assert "<b>run" not in html


def test_a_long_run_stays_small(tmp_path: Path) -> None:
    metrics, traces, summary = simulate(steps=120, groups=16, in_flight=32, samples=16, slots=256)
    report = write_report(write_run(tmp_path, metrics, traces, summary))
    assert report.stat().st_size < 2_000_000
    assert re.search(r"<select", report.read_text()), "one can choose the step whose timeline is shown"


def test_the_report_contains_the_choices_and_forecasts_of_admission(tmp_path: Path) -> None:
    metrics, traces, summary = simulate()
    for record in metrics[1:]:
        record |= {
            "expected_consumed_tokens_per_second": 120.0,
            "response_length_expected": 80.0,
            "over_sampling_batch_size": 12,
            "admission_reason": "the smallest N' expected to reach 97% of the best <that> the bound allows",
        }
    traces[-1]["choices"] = [[8, 100.0, 0.0], [12, 12345.6, 0.754]]
    text = " ".join(page(write_run(tmp_path, metrics, traces, summary)).text)
    assert "Admission and lengths" in text
    assert "What was expected of each N'" in text
    assert "12 12.3k 0.75" in text
    assert "Last decision: the smallest N' expected to reach 97% of the best <that> the bound allows." in text


def test_a_number_that_was_set_is_no_decision_to_explain(tmp_path: Path) -> None:
    text = " ".join(page(write_run(tmp_path, *simulate())).text)
    assert "Admission and lengths" not in text


def test_watch_follows_a_run_to_its_end(tmp_path: Path) -> None:
    metrics, traces, summary = simulate(steps=2)
    directory = write_run(tmp_path, metrics, traces, None)
    assert 'http-equiv="refresh" content="1"' in write_report(directory, refresh=1).read_text()
    ending = threading.Timer(0.2, write_run, (tmp_path, metrics, traces, summary))
    ending.start()
    page = follow(directory, interval=1).read_text()
    ending.join()
    assert 'http-equiv="refresh"' not in page
    assert "no summary yet" not in page
