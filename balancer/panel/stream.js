// The status stream: what it tells is put together by pure functions; `follow` keeps it open.

const SILENCE = 12_000;
/** Milliseconds; the balancer says something every 3 s. */

const LONGEST_PAUSE = 10_000;

/** Why an attempt is given up: another one is wanted at once. */
const AGAIN = new Error('tried again');

/** The data after this event; the data before is left as it was. */
export function apply(data, { event, told }) {
  if (event === 'snapshot') return { ...emptied(data), ...told };
  if (event !== 'change') return data;
  const next = { ...data };
  for (const [section, changes] of Object.entries(told)) {
    const values = { ...next[section] };
    for (const [key, value] of Object.entries(changes)) {
      if (value === null) delete values[key];
      else values[key] = value;
    }
    next[section] = values;
  }
  return next;
}

const emptied = (data) => Object.fromEntries(Object.keys(data).map((section) => [section, {}]));

/** Events that are complete in this text, and the rest of it. */
export function split(text) {
  const blocks = text.split('\n\n');
  const rest = blocks.pop();
  return { events: blocks.map(parse).filter((event) => event !== null), rest };
}

/** Null: a comment only. */
function parse(block) {
  const fields = {};
  for (const line of block.split('\n')) {
    const colon = line.indexOf(':');
    if (colon > 0) fields[line.slice(0, colon)] = line.slice(colon + 1).replace(/^ /, '');
  }
  if (fields.data === undefined) return null;
  return { id: fields.id ?? null, event: fields.event, told: JSON.parse(fields.data) };
}

/** Milliseconds to wait after so many failures; `chance`: from 0 to 1. */
export function pauseAfter(failures, chance) {
  return Math.min(LONGEST_PAUSE, 250 * 2 ** failures) * (0.5 + chance / 2);
}

/**
 * Follows the stream for ever. `open(lastId, signal)` returns a response, `take(event)` gets each
 * event, `opened()` and `broken(error)` are told of the connection (its error is null where the
 * balancer has ended it), and `pause(failures, signal)` is waited for before the next attempt. While
 * `isHeld()`, an attempt waits for the operator, and may last. Returns `resume`, which ends a pause,
 * and `retry`, which also gives up an attempt that has brought nothing yet, for another one.
 */
export function follow({ open, take, opened, broken, pause, isHeld = () => false, silence = SILENCE }) {
  let lastId = null;
  let failures = 0;
  /** What of it can be cut short now. */
  let attempt = null;
  let rest = null;

  async function read(controller) {
    let watch;
    const heard = () => {
      clearTimeout(watch);
      watch = setTimeout(() => (isHeld() ? heard() : controller.abort(new Error('the balancer has fallen silent'))), silence);
    };
    try {
      heard();
      const response = await open(lastId, controller.signal);
      controller.signal.throwIfAborted();
      heard();
      attempt = null;
      opened();
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      let text = '';
      for (;;) {
        const { done, value } = await reader.read();
        if (done) return;
        heard();
        failures = 0;
        const { events, rest } = split(text + value);
        text = rest;
        for (const event of events) {
          lastId = event.id ?? lastId;
          take(event);
        }
      }
    } finally {
      clearTimeout(watch);
    }
  }

  async function run() {
    for (;;) {
      const controller = new AbortController();
      attempt = controller;
      let error = null;
      try {
        await read(controller);
      } catch (caught) {
        error = controller.signal.aborted ? controller.signal.reason : caught;
      }
      attempt = null;
      controller.abort();
      if (error === AGAIN) continue;
      broken(error);
      rest = new AbortController();
      await pause(failures++, rest.signal);
      rest = null;
    }
  }

  run();
  return {
    resume: () => rest?.abort(),
    retry: () => {
      rest?.abort();
      if (!isHeld()) attempt?.abort(AGAIN);
    },
  };
}
