"""The panel's modules, in a real browser, without a balancer: a page answers for it where one is asked."""

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from browsing import Window, open_window, start_browser
from playwright.sync_api import Browser

PANEL = Path(__file__).parents[1] / "balancer" / "panel"

Run: TypeAlias = Callable[..., Any]


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        pass


@pytest.fixture(scope="module")
def browser() -> Generator[Browser]:
    with start_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def address() -> Generator[str]:
    """Of the panel's files."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(PANEL)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def opened(browser: Browser, address: str) -> Generator[Window]:
    """An empty page."""
    with open_window(browser) as window:
        window.page.goto(f"{address}/vendor/")
        yield window
        window.forgive("/favicon.ico")


def evaluate(window: Window, module: str, expression: str, *arguments: Any) -> Any:
    return window.page.evaluate(
        f"async (a) => {{ const m = await import('/{module}'); return {expression}; }}",
        list(arguments),
    )


@pytest.fixture(scope="module")
def run(browser: Browser, address: str) -> Generator[Run]:
    """``run(MODULE, EXPRESSION, *ARGUMENTS)``: the value of an expression in which ``m`` is the module
    and ``a`` the arguments.
    """
    with opened(browser, address) as window:
        yield partial(evaluate, window)


BALANCER = """
const { state, answer } = await import('/store.js');
/** What is asked, such as "GET api/v1/overview", and how it was answered. */
const asked = [];
/** By what is asked: `(options) => [STATUS, TEXT OR OBJECT, HEADERS]`. */
const answers = {};
globalThis.fetch = async (url, options) => {
  const what = `${options.method} ${url.pathname.slice(1)}`;
  asked.push({ what, ...options });
  const [status, told = null, headers = {}] = await answers[what](options);
  const text = typeof told === 'string' || told === null ? told : JSON.stringify(told);
  return new Response(text, { status, headers });
};
const until = async (condition) => {
  while (!condition()) await new Promise(requestAnimationFrame);
};
"""
"""In its place, for the modules that ask one."""

NEVER = "new Promise((_, reject) => setTimeout(() => reject(new Error('it never ends')), 60_000))"


@pytest.fixture
def act(browser: Browser, address: str) -> Generator[Run]:
    """``act(MODULE, STATEMENTS, *ARGUMENTS)`` in a page of its own, with what ``BALANCER`` defines."""
    with opened(browser, address) as window:

        def act(module: str, statements: str, *arguments: Any) -> Any:
            body = f"(async () => {{ {BALANCER} {statements} }})()"
            return evaluate(window, module, f"Promise.race([{body}, {NEVER}])", *arguments)

        yield act


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


def test_what_is_sent_leaves_out_answers_that_came_to_nothing_and_their_questions(run: Run) -> None:
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
            {"role": "user", "content": [image, {"type": "text", "text": "two"}]},
        ],
        "enable_thinking": True,
        "max_tokens": 5,
        "tools": [],
        "model": "m",
        "sampling": {"temperature": 0},
    }


def test_roles_take_turns_in_what_is_sent_and_a_stopped_answer_stays(run: Run) -> None:
    said = [("failed", ""), ("stopped", "half"), ("stopped", ""), ("done", "whole")]
    messages: list[Any] = []
    for n, (state, text) in enumerate(said):
        messages.append({"role": "user", "text": str(n), "images": ["data:,"]})
        messages.append({"role": "assistant", "text": text, "thoughts": "hm", "state": state})
    messages.append({"role": "user", "text": "last", "images": []})
    options = {"system": "", "thinks": False, "maxTokens": 5, "model": "", "temperature": None}

    sent = run("conversation.js", "m.request('9', a[0], a[1])", messages, options)

    told = sent["Request"]["request"]["ContinueFromConversationHistory"]["conversation_history"]
    assert [message["role"] for message in told] == ["user", "assistant"] * 2 + ["user"]
    assert [message["content"] for message in told[1::2]] == ["half", "whole"]


def test_the_size_of_a_message_is_that_of_its_bytes(run: Run) -> None:
    assert run("conversation.js", "m.size({ a: '\\u20ac' })") == len('{"a":"\u20ac"}'.encode())


PROMPT = """
globalThis.WebSocket = class extends EventTarget {
  constructor() { super(); setTimeout(() => this.dispatchEvent(new Event('open'))); }
  send(text) { sent.push(JSON.parse(text)); }
};
const sent = [];
answers['GET v1/models'] = () => [200, {}];
const { render } = await import('/lit.js');
document.body.innerHTML = '<main></main>';
const show = () => render(m.view({ ...state, data: { balancer: {} } }), document.querySelector('main'));
const submit = () => { show(); document.querySelector('form').requestSubmit(); };
const image = 'data:image/png;base64,' + 'A'.repeat(2_500_000);
"""


def test_images_of_earlier_messages_count_when_another_is_sent(act: Run) -> None:
    notices, rounds, kept = act(
        "prompt.js",
        PROMPT
        + """
        const { prompt } = state;
        for (let n = 0; n < 3; n++) {
          Object.assign(prompt, { text: 'see', images: [image] });
          submit();
          if (state.notices.length) break;
          await until(() => sent.length === n + 1);
          prompt.messages = prompt.messages.map((message) =>
            message.role === 'user' ? message : { ...message, state: 'done', text: 'seen' });
        }
        return [state.notices.map(({ text }) => text), sent.length, prompt.images.length];
        """,
    )

    assert (len(notices), rounds, kept) == (1, 2, 1)
    assert "7.5 MB" in notices[0]
    assert "begin a new conversation" in notices[0]


def test_an_image_for_which_there_is_no_room_is_not_added(act: Run) -> None:
    images, notices = act(
        "prompt.js",
        PROMPT
        + """
        state.prompt.images = [image, image];
        show();
        const files = new DataTransfer();
        files.items.add(new File(['x'.repeat(1_500_000)], 'x.png'));
        const input = document.querySelector('input[type=file]');
        input.files = files.files;
        input.dispatchEvent(new Event('change'));
        await until(() => state.notices.length || state.prompt.images.length === 3);
        return [state.prompt.images.length, state.notices.map(({ text }) => text)];
        """,
    )

    assert (images, len(notices)) == (2, 1)
    assert "at most 6 MB" in notices[0]


def test_a_page_whose_origin_is_not_allowed_is_not_asked_for_a_key(act: Run) -> None:
    text, wants_key, key, dialogs = act(
        "api.js",
        """
        sessionStorage.setItem('headrace.management', 'good');
        answers['PUT x'] = () => [403, 'not allowed', { 'x-headrace-error': 'origin_not_allowed' }];
        const error = await m.ask('PUT', 'x').catch((error) => error);
        return [error.message, error.wantsKey, sessionStorage.getItem('headrace.management'), state.dialogs.length];
        """,
    )

    assert "started with --allow-origin http://127.0.0.1:" in text
    assert (wants_key, key, dialogs) == (False, "good", 0)


@pytest.mark.parametrize(
    ("status", "text", "headers"),
    [
        (401, "no", {"x-headrace-error": "unauthorized"}),
        (403, "no", {"x-headrace-error": "forbidden"}),
        (403, {"error": {"code": "forbidden", "message": "no"}}, {}),
    ],
)
def test_a_typed_key_replaces_another_only_when_it_was_accepted(
    act: Run, status: int, text: Any, headers: dict[str, str]
) -> None:
    seen, key = act(
        "api.js",
        """
        const stored = () => sessionStorage.getItem('headrace.management');
        sessionStorage.setItem('headrace.management', 'old');
        answers['GET x'] = ({ headers }) =>
          headers.authorization === 'Bearer new' ? [204] : a;
        const done = m.ask('GET', 'x');
        const seen = [];
        for (const typed of ['wrong', 'new']) {
          await until(() => state.dialogs.length);
          seen.push(stored());
          answer(state.dialogs[0], typed);
        }
        await done;
        return [seen, stored()];
        """,
        status,
        text,
        headers,
    )

    assert (seen, key) == (["old", "old"], "new")


def test_a_question_without_a_key_is_given_up_and_the_old_key_stays(act: Run) -> None:
    told = act(
        "api.js",
        """
        sessionStorage.setItem('headrace.management', 'old');
        answers['GET x'] = () => [401, 'no'];
        const done = m.ask('GET', 'x').catch((error) => [error.status, error.wantsKey]);
        for (const typed of ['wrong', null]) {
          await until(() => state.dialogs.length);
          answer(state.dialogs[0], typed);
        }
        return [await done, sessionStorage.getItem('headrace.management')];
        """,
    )

    assert told == [[401, True], "old"]


FOLLOW = """
const attempts = [];
const broken = [];
const pauses = [];
let isHeld = false;
const { retry, resume } = m.follow({
  open: (lastId, signal) =>
    new Promise((resolve, reject) => {
      attempts.push(signal);
      signal.addEventListener('abort', () => reject(signal.reason));
    }),
  take() {},
  opened() {},
  broken: (error) => broken.push(error.message),
  pause: (failures, signal) => {
    pauses.push(failures);
    return new Promise((resolve) => signal.addEventListener('abort', resolve));
  },
  isHeld: () => isHeld,
  silence: a[0],
});
await until(() => attempts.length === 1);
"""


def test_an_attempt_to_connect_is_given_up_when_nothing_comes(act: Run) -> None:
    told = act(
        "stream.js",
        FOLLOW
        + """
        await until(() => pauses.length);
        resume();
        await until(() => attempts.length === 2);
        return broken;
        """,
        20,
    )

    assert told == ["the balancer has fallen silent"]


def test_an_attempt_waits_as_long_as_the_operator_types_a_key(act: Run) -> None:
    told = act(
        "stream.js",
        """
        let looks = 0;
        const started = m.follow({
          open: (lastId, signal) => new Promise((resolve, reject) => signal.addEventListener('abort', () => reject(signal.reason))),
          take() {},
          opened() {},
          broken: (error) => (state.failed = [error.message, looks]),
          pause: () => new Promise(() => {}),
          isHeld: () => ++looks < 3,
          silence: 20,
        });
        await until(() => state.failed);
        return state.failed;
        """,
    )

    assert told == ["the balancer has fallen silent", 3]


def test_an_attempt_that_hangs_is_begun_anew_at_once(act: Run) -> None:
    told = act(
        "stream.js",
        FOLLOW
        + """
        isHeld = true;
        retry();
        const held = attempts[0].aborted;
        isHeld = false;
        retry();
        await until(() => attempts.length === 2);
        return [held, attempts.map((signal) => signal.aborted), broken, pauses];
        """,
        1_000_000,
    )

    assert told == [False, [True, False], [], []]


MODEL = """
const desired = (top_k) => ({
  model: 'None', multimodal_projection: 'None', use_chat_template_override: false,
  chat_template_override: null, inference_parameters: { top_k },
});
let stored = desired(1);
let wish = 5;
const schema = { properties: { inference_parameters: { properties: { top_k: { type: 'integer' } } } } };
const path = 'api/v1/balancer_desired_state';
const put = [];
answers[`GET ${path}`] = () => [200, stored, { etag: `"${wish}"` }];
answers[`GET ${path}/schema`] = () => [200, { schema, defaults: desired(0) }];
answers[`PUT ${path}`] = ({ headers, body }) => {
  put.push(headers['if-match']);
  if (headers['if-match'] !== `"${wish}"`) return [409, 'something else was put'];
  stored = JSON.parse(body);
  wish++;
  return [204];
};
const tell = () => {
  state.data = { ...state.data, agents: {}, balancer: { model: { wish_number: wish } } };
  m.told();
};
const { edit } = await import('/draft.js');
const { render } = await import('/lit.js');
document.body.innerHTML = '<main></main>';
const main = document.querySelector('main');
const draw = () => render(m.view(state), main);
const apply = async () => {
  draw();
  main.querySelector('form').requestSubmit();
  await until(() => !state.busy.size);
  draw();
};
tell();
m.enter();
await until(() => state.model.draft);
const typeInto = (top_k) => edit({ parameters: { top_k } });
"""


def test_what_is_typed_while_the_state_is_loaded_stays(act: Run) -> None:
    typed, banner = act(
        "model.js",
        MODEL
        + """
        stored = desired(2);
        wish++;
        tell();
        typeInto('7');
        await until(() => state.model.theirs);
        draw();
        return [state.model.draft.parameters.top_k, main.querySelector('.banner').textContent];
        """,
    )

    assert typed == "7"
    assert "Somebody else has changed the desired state" in banner


def test_what_is_applied_says_what_it_was_made_from_and_fleets_do_not_matter(act: Run) -> None:
    put, stored, is_edited, notices = act(
        "model.js",
        MODEL
        + """
        typeInto('7');
        wish = 8;
        await apply();
        return [put, stored.inference_parameters, state.model.isEdited, state.notices.map(({ tone }) => tone)];
        """,
    )

    assert put == ['"5"', '"8"']
    assert (stored, is_edited, notices) == ({"top_k": 7}, False, ["good"])


def test_what_somebody_else_has_put_is_replaced_only_by_who_was_told(act: Run) -> None:
    first, banner, then, put = act(
        "model.js",
        MODEL
        + """
        typeInto('7');
        stored = desired(2);
        wish = 6;
        await apply();
        await apply();
        const first = stored.inference_parameters.top_k;
        const banner = main.querySelector('.banner');
        const text = banner.textContent;
        banner.querySelectorAll('button')[1].click();
        await apply();
        return [first, text, stored.inference_parameters.top_k, put];
        """,
    )

    assert (first, then) == (2, 7)
    assert "Somebody else has changed the desired state" in banner
    assert put == ['"5"', '"5"', '"6"']


FLEETS = """
const { draftOf, fleetOf } = await import('/fleet_fields.js');
const fleet = fleetOf(draftOf(null), null).fleet;
const tell = (fleet) => {
  state.data = { ...state.data, fleets: fleet ? { small: { fleet } } : {} };
  m.told();
};
const put = [];
answers['PATCH api/v1/fleets/small'] = ({ body }) => {
  put.push(JSON.parse(body));
  return [204];
};
const { render } = await import('/lit.js');
document.body.innerHTML = '<main></main>';
const main = document.querySelector('main');
const draw = () => render(m.view(state), main);
const typeInto = (name, text) => {
  draw();
  const field = document.getElementById(`fleet-${name}`);
  field.value = text;
  field.dispatchEvent(new Event('input'));
  draw();
};
const banner = () => {
  draw();
  return main.querySelector('.banner')?.textContent ?? null;
};
Object.assign(state, { page: 'fleets', argument: 'small' });
tell(fleet);
m.enter();
"""


def test_only_what_was_changed_of_a_fleet_is_applied(act: Run) -> None:
    before, banner, put = act(
        "fleets.js",
        FLEETS
        + """
        typeInto('max', '3');
        typeInto('engine.threads', '2');
        const before = banner();
        tell({ ...fleet, min: 1, engine: { ...fleet.engine, n_batch: 64 } });
        const after = banner();
        main.querySelector('.fleet-form').requestSubmit();
        await until(() => put.length);
        return [before, after, put];
        """,
    )

    assert before is None
    assert "Somebody else has changed this fleet" in banner
    assert [list(change) for change in put] == [["max", "engine"]]
    assert (put[0]["max"], put[0]["engine"]["threads"], put[0]["engine"]["n_batch"]) == (3, 2, 64)


def test_the_form_of_a_fleet_shows_what_is_there_until_it_is_edited(act: Run) -> None:
    shown = act(
        "fleets.js",
        FLEETS
        + """
        const shown = () => state.fleets.form.draft.max;
        const seen = [shown()];
        tell({ ...fleet, max: 2 });
        seen.push(shown());
        typeInto('max', '5');
        tell({ ...fleet, max: 3 });
        seen.push(shown());
        m.enter();
        seen.push(shown(), banner());
        return seen;
        """,
    )

    assert shown == ["1", "2", "5", "3", None]


def test_a_fleet_that_is_deleted_meanwhile_is_said_to_be_gone(act: Run) -> None:
    told = act("fleets.js", FLEETS + "typeInto('max', '5'); tell(null); return banner();")

    assert "Somebody else has deleted this fleet" in told


def test_a_request_of_which_the_stream_says_nothing_is_looked_at_until_it_is_over(act: Run) -> None:
    told = act(
        "requests.js",
        """
        const states = ['waiting', 'running', 'over'];
        answers['GET api/v1/requests/x'] = () => [200, { state: states[asked.length - 1], decisions: [] }];
        Object.assign(state, { page: 'requests', argument: 'x' });
        // Its pauses take no time here.
        const timers = [];
        globalThis.setTimeout = (work, pause) => timers.push({ work, pause });
        m.enter();
        const seen = [];
        for (const each of states) {
          await until(() => state.requests.shown?.state === each);
          seen.push(each, timers.length);
          timers.pop()?.work();
        }
        return [seen, asked.length];
        """,
    )

    assert told == [["waiting", 1, "running", 1, "over", 0], 3]


def test_rates_are_of_the_time_between_two_notes_and_none_after_a_restart(run: Run) -> None:
    notes = {
        str(n): {"at": n * 2, "tokens": tokens, "running": n, "buffered": 0, "first_token": None}
        for n, tokens in [(9, 10), (10, 30), (11, 0)]
    }

    lines = run("charts.js", "m.series(a[0])", notes)

    assert lines["rate"] == [None, 10, None]
    assert lines["running"] == [9, 10, 11]


def test_requests_stand_as_they_are_served(run: Run) -> None:
    requests = {
        str(n): {"id": str(n), "state": state, "arrived": n}
        for n, state in enumerate(["running", "running", "waiting", "waiting", "over", "over"])
    }

    turn = run("requests.js", "m.inTurn(a[0]).map((each) => each.id)", requests)

    assert turn == ["1", "0", "2", "3", "5", "4"]


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
