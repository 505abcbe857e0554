"""The panel's pure modules, in a real browser, without a balancer."""

import threading
from collections.abc import Callable, Generator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from browsing import open_window, start_browser

PANEL = Path(__file__).parents[1] / "balancer" / "panel"

Run: TypeAlias = Callable[..., Any]


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        pass


@pytest.fixture(scope="module")
def run() -> Generator[Run]:
    """``run(MODULE, EXPRESSION, *ARGUMENTS)``: the value of an expression in which ``m`` is the module
    and ``a`` the arguments.
    """
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(PANEL)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        with start_browser() as browser, open_window(browser) as window:
            window.page.goto(f"http://127.0.0.1:{server.server_port}/vendor/")

            def run(module: str, expression: str, *arguments: Any) -> Any:
                return window.page.evaluate(
                    f"async (a) => {{ const m = await import('/{module}'); return {expression}; }}",
                    list(arguments),
                )

            yield run
            window.forgive("/favicon.ico")
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_change_replaces_and_removes_values_and_leaves_the_others(run: Run) -> None:
    before = {"agents": {"a": {"slots": 1}, "b": {"slots": 2}}, "errors": {"1": {"count": 1}}}
    change = {
        "event": "change",
        "told": {"agents": {"a": None, "b": {"slots": 3}, "c": {"slots": 4}}},
    }

    after, kept = run("stream.js", "[m.apply(a[0], a[1]), a[0]]", before, change)

    assert after == {
        "agents": {"b": {"slots": 3}, "c": {"slots": 4}},
        "errors": {"1": {"count": 1}},
    }
    assert kept == before


def test_a_snapshot_replaces_everything_also_what_it_does_not_name(run: Run) -> None:
    before: Any = {"agents": {"a": {}}, "errors": {"1": {}}}

    after = run("stream.js", "m.apply(...a)", before, {"event": "snapshot", "told": {"agents": {}}})

    assert after == {"agents": {}, "errors": {}}


def test_an_event_of_a_later_version_changes_nothing(run: Run) -> None:
    assert run("stream.js", "m.apply(...a)", {"agents": {}}, {"event": "x", "told": {}}) == {
        "agents": {}
    }


def test_events_are_read_wherever_the_text_is_cut(run: Run) -> None:
    text = ': hello\n\nid: e-1\nevent: change\ndata: {"agents":{"a: b":1}}\n\n: x\n\nid: e-2\nda'
    first = [{"id": "e-1", "event": "change", "told": {"agents": {"a: b": 1}}}]

    assert run("stream.js", "m.split(a[0])", text) == {"events": first, "rest": "id: e-2\nda"}
    for cut in range(len(text)):
        events, rest = run(
            "stream.js",
            "(({events, rest}) => { const then = m.split(rest + a[1]);"
            " return [[...events, ...then.events], then.rest]; })(m.split(a[0]))",
            text[:cut],
            text[cut:],
        )
        assert (events, rest) == (first, "id: e-2\nda")


def test_pauses_grow_to_a_bound_and_differ(run: Run) -> None:
    shortest, longest = run(
        "stream.js", "[0, 1].map(c => [...Array(12).keys()].map(n => m.pauseAfter(n, c)))"
    )

    assert shortest == sorted(shortest)
    assert longest[0] < 1000
    assert longest[-1] == 10_000
    assert all(2 * low == high for low, high in zip(shortest, longest, strict=True))


REFERENCES = {
    "": "None",
    "agent:///models/a b.gguf": {"LocalToAgent": "/models/a b.gguf"},
    "https://models.example/a.gguf?x=1": {"Url": {"url": "https://models.example/a.gguf?x=1"}},
    "https://huggingface.co/o/r/resolve/main/sub/a.gguf": {
        "HuggingFace": {"repo_id": "o/r", "revision": "main", "filename": "sub/a.gguf"}
    },
    "https://huggingface.co/o/r": {"Url": {"url": "https://huggingface.co/o/r"}},
}


@pytest.mark.parametrize("text", REFERENCES)
def test_a_reference_is_read_as_it_is_shown(run: Run, text: str) -> None:
    model = REFERENCES[text]

    assert run("reference.js", "m.parseReference(a[0])", text) == {"model": model}
    assert run("reference.js", "m.showReference(a[0])", model) == text


def test_references_are_read_as_people_write_them(run: Run) -> None:
    blob = "  https://huggingface.co/o/r/blob/v1/a.gguf?download=true "
    read = {"repo_id": "o/r", "revision": "v1", "filename": "a.gguf"}

    assert run("reference.js", "m.parseReference(a[0])", blob) == {"model": {"HuggingFace": read}}
    assert run("reference.js", "m.parseReference('/m/a.gguf')") == {
        "model": {"LocalToAgent": "/m/a.gguf"}
    }


@pytest.mark.parametrize("text", ["a.gguf", "agent://a.gguf", "ftp://a/b", "https://", "agent:///"])
def test_what_nobody_can_mean_is_no_reference(run: Run, text: str) -> None:
    assert list(run("reference.js", "m.parseReference(a[0])", text)) == ["problem"]


def test_a_checksum_stays_where_the_address_is_not_touched(run: Run) -> None:
    before = {"Url": {"url": "https://a/b.gguf", "sha256": "0" * 64}}

    same = run("reference.js", "m.changedReference(...a)", "https://a/b.gguf", before)
    other = run("reference.js", "m.changedReference(...a)", "https://a/c.gguf", before)

    assert same == {"model": before}
    assert other == {"model": {"Url": {"url": "https://a/c.gguf"}}}


FIELD = {"kind": "number", "low": 0, "high": 100, "range": "above 0, up to 100"}


@pytest.mark.parametrize(
    ("text", "answer"),
    [("1.5", {"value": 1.5}), ("100", {"value": 100}), ("1e1", {"value": 10})],
)
def test_a_number_in_its_range_is_read(run: Run, text: str, answer: Any) -> None:
    assert run("schema.js", "m.readField(...a)", FIELD, text) == answer


@pytest.mark.parametrize("text", ["", "x", "0", "-1", "100.5", "Infinity"])
def test_other_texts_are_told_what_is_wrong(run: Run, text: str) -> None:
    assert list(run("schema.js", "m.readField(...a)", FIELD, text)) == ["problem"]


def test_a_whole_number_is_wanted_where_the_schema_says_integer(run: Run) -> None:
    schema = {
        "$defs": {"P": {"properties": {"n": {"type": "integer", "exclusiveMinimum": 0}}}},
        "properties": {"p": {"$ref": "#/$defs/P"}},
    }

    texts = ["1", "0", "1.5"]
    answers = run(
        "schema.js",
        "a[1].map(text => m.readField(m.fields(a[0].properties.p, a[0])[0], text))",
        schema,
        texts,
    )

    assert [list(answer) for answer in answers] == [["value"], ["problem"], ["problem"]]


def test_the_pace_of_a_download_is_that_of_the_last_seconds(run: Run) -> None:
    told = [(0, 0), (1, 100), (100, 200), (110, 1200)]

    seen, pace = run(
        "downloads.js",
        "(() => { let seen = {}; for (const [at, current] of a[0]) seen ="
        " m.observe(seen, {x: {download: {filename: 'f', current}}}, at);"
        " return [seen.x.samples.length, m.pace(seen.x, {current: 1200, total: 2200}, a[1])]; })()",
        told,
        110,
    )

    assert seen == 2
    assert pace == {"rate": 100, "left": 10}


def test_a_download_that_stands_still_is_told_as_slower_and_slower(run: Run) -> None:
    seen = {"samples": [{"at": 0, "current": 0}, {"at": 1, "current": 100}]}
    file = {"current": 100, "total": 200}

    paces = run("downloads.js", "[1, 10, 100].map(at => m.pace(a[0], a[1], at).rate)", seen, file)

    assert paces == [100, 10, 1]


def test_nothing_is_said_of_a_download_that_has_only_begun(run: Run) -> None:
    assert run(
        "downloads.js", "m.pace({samples: [{at: 1, current: 5}]}, {current: 5, total: 9}, 2)"
    ) == {"rate": None, "left": None}


def generated(token: Any) -> dict[str, Any]:
    response = {"GeneratedToken": token}
    return {"Response": {"generated_by": "a1", "request_id": "1", "response": response}}


USAGE = {
    "prompt_tokens": 7,
    "cached_prompt_tokens": 3,
    "content_tokens": 2,
    "reasoning_tokens": 1,
    "tool_call_tokens": 0,
    "undeterminable_tokens": 0,
}
HEAR = (
    "(() => { let answer = m.newAnswer('1', 10); a[0].forEach((message, n) =>"
    " { answer = m.hear(answer, message, 11 + n); }); return [answer, m.timings(answer)]; })()"
)


def test_an_answer_is_put_together_with_thoughts_apart(run: Run) -> None:
    messages = [
        generated({"ReasoningToken": "hm"}),
        generated({"ContentToken": "<b>"}),
        generated({"ContentToken": "x"}),
        generated({"Done": {"usage": USAGE}}),
    ]

    answer, timings = run("conversation.js", HEAR, messages)

    assert (answer["state"], answer["thoughts"], answer["text"]) == ("done", "hm", "<b>x")
    assert answer["agent"] == "a1"
    assert timings == {"firstToken": 1, "tokens": 3, "rate": 1}


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ({"Error": {"request_id": "1", "error": {"code": 503, "description": "full"}}}, "full"),
        (generated({"ImageDecodingFailed": "no image"}), "no image"),
        (generated({"ImageExceedsBatchSize": {"n_batch": 1}}), '{"n_batch":1}'),
    ],
)
def test_a_failure_ends_an_answer_and_keeps_what_came(run: Run, message: Any, problem: str) -> None:
    told = [generated({"ContentToken": "a"}), message, generated({"ContentToken": "b"})]

    answer, _ = run("conversation.js", HEAR, told)

    assert (answer["state"], answer["problem"], answer["text"]) == ("failed", problem, "a")


def test_a_stopped_answer_takes_no_more_text_but_its_usage(run: Run) -> None:
    answer = run(
        "conversation.js",
        "[...a].reduce((answer, message) => m.hear(answer, message, 12),"
        " m.stop(m.newAnswer('1', 10), 11))",
        generated({"ContentToken": "late"}),
        generated({"Done": {"usage": USAGE}}),
    )

    assert (answer["state"], answer["text"], answer["usage"]) == ("stopped", "", USAGE)


def test_thoughts_and_calls_are_shown_apart_and_all_of_it_as_text(run: Run) -> None:
    told = {
        "text": "<i>4</i>",
        "thoughts": "<b>2 + 2</b>",
        "calls": "add(2, 2)",
        "state": "done",
        "problem": None,
        "agent": "a1",
        "usage": USAGE,
        "sent": 1,
        "first": 2,
        "last": 3,
    }

    thoughts, is_open, text, calls, facts = run(
        "message.js",
        "(async () => { const lit = await import('/lit.js');"
        " lit.render(m.messageView(a[0]), document.body);"
        " const find = (path) => document.querySelector(path);"
        " return [find('details .text').textContent, find('details').open,"
        " find('article > .text').textContent, find('.calls pre').textContent,"
        " find('.facts').textContent]; })()",
        told,
    )

    assert (thoughts, is_open, text) == (told["thoughts"], False, told["text"])
    assert calls == told["calls"]
    assert facts.startswith("a1 \u00b7 first token after 1.00 s \u00b7 2.0 tok/s \u00b7 3 tokens")


def test_what_is_sent_leaves_out_thoughts_and_answers_that_failed(run: Run) -> None:
    messages: Any = [
        {"role": "user", "text": "one", "images": []},
        {"role": "assistant", "text": "", "thoughts": "hm"},
        {"role": "user", "text": "two", "images": ["data:image/png;base64,AA"]},
    ]
    options = {
        "system": "be brief",
        "thinks": True,
        "maxTokens": 5,
        "model": "m",
        "temperature": 0,
    }

    sent = run("conversation.js", "m.request('9', a[0], a[1])", messages, options)

    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
    assert sent["Request"]["request"]["ContinueFromConversationHistory"] == {
        "add_generation_prompt": True,
        "conversation_history": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "one"},
            {"role": "user", "content": [image, {"type": "text", "text": "two"}]},
        ],
        "enable_thinking": True,
        "max_tokens": 5,
        "tools": [],
        "model": "m",
        "sampling": {"temperature": 0},
    }


def test_rates_are_of_the_time_between_two_notes_and_none_after_a_restart(run: Run) -> None:
    notes = {
        str(n): {"at": n * 2, "tokens": tokens, "running": n, "buffered": 0, "first_token": None}
        for n, tokens in [(9, 10), (10, 30), (11, 0)]
    }

    lines = run("charts.js", "m.series(a[0])", notes)

    assert lines["rate"] == [None, 10, None]
    assert lines["running"] == [9, 10, 11]


@pytest.mark.parametrize(
    ("ticks", "labels"),
    [
        ([0, 0.05, 0.1, 0.15], ["0.00", "0.05", "0.10", "0.15"]),
        ([0, 0.5, 1], ["0.0", "0.5", "1.0"]),
        ([0, 20, 40], ["0", "20", "40"]),
        ([0], ["0"]),
    ],
)
def test_labels_of_a_chart_can_be_told_apart(
    run: Run, ticks: list[float], labels: list[str]
) -> None:
    assert run("charts.js", "m.labels(a[0])", ticks) == labels


def test_a_fleet_is_read_as_it_is_shown(run: Run) -> None:
    fleet = run("fleet_fields.js", "m.fleetOf(m.draftOf(null), null)")["fleet"]
    fleet["resources"]["labels"] = {"pool": "gpu", "zone": "a"}
    fleet["engine"]["tensor_split"] = [3, 1]
    fleet["min"], fleet["max"] = 2, 3

    assert run("fleet_fields.js", "m.fleetOf(m.draftOf(a[0]), a[0])", fleet) == {
        "fleet": fleet,
        "problems": {},
    }


def test_a_fleet_with_min_above_max_is_not_valid(run: Run) -> None:
    told = run("fleet_fields.js", "m.fleetOf({...m.draftOf(null), min: '2', max: '1'}, null)")

    assert list(told["problems"]) == ["min"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0123, "12 ms"), (1.5, "1.50 s"), (61, "1 min 1 s"), (7300, "2 h 1 min"), (None, "\u2013")],
)
def test_times_are_shown_as_people_read_them(run: Run, value: float | None, text: str) -> None:
    assert run("format.js", "m.seconds(a[0])", value) == text


def test_what_is_shipped_is_whole_and_has_its_licence() -> None:
    for folder in (PANEL / "vendor").iterdir():
        assert (folder / "LICENSE").is_file()
    for file in PANEL.rglob("*.js"):
        assert "sourceMappingURL" not in file.read_text()
