// The panel's one state. Views read it; whoever changes it says so with `update`, and it is drawn
// anew before the next frame. So whatever is done on an event looks at the state as it is then: what a
// view was drawn from may be older.

export const EMPTY = Object.freeze({
  agents: {},
  fleets: {},
  requests: {},
  errors: {},
  history: {},
  balancer: {},
});

export const state = {
  page: 'dashboard',
  /** What stands behind the page's name in the address, such as a request's id. */
  argument: null,
  link: { phase: 'connecting', since: null, reason: null },
  /** What the status stream has told: sections of values by key. */
  data: EMPTY,
  /** Seconds that the balancer's clock is ahead of ours. */
  skew: 0,
  /** How downloads got on lately, by agent. */
  downloads: {},
  notices: [],
  /** Questions to the operator; the first is shown. */
  dialogs: [],
  /** Names of the actions that run now. */
  busy: new Set(),
};

/** To the status stream, if it is broken: `resume` ends a pause, `retry` also an attempt that hangs. */
export const link = { resume() {}, retry() {} };

let draw = () => {};
let isScheduled = false;

/** Tells what draws the state. */
export function onChange(callback) {
  draw = callback;
}

export function update(change = () => {}) {
  change(state);
  if (isScheduled) return;
  isScheduled = true;
  requestAnimationFrame(() => {
    isScheduled = false;
    draw();
  });
}

let noticeNumber = 0;

/** Tells the operator something; `tone`: good or bad. Good news goes by itself. */
export function tell(text, tone = 'good') {
  const notice = { number: ++noticeNumber, text, tone };
  update((state) => {
    state.notices = [...state.notices.slice(-3), notice];
  });
  if (tone === 'good') setTimeout(() => dismiss(notice.number), 8000);
}

export function dismiss(number) {
  update((state) => {
    state.notices = state.notices.filter((notice) => notice.number !== number);
  });
}

/** Does what the operator wants: once at a time, and a failure is told. Returns whether it worked. */
export async function perform(name, work, done = null) {
  if (state.busy.has(name)) return false;
  update((state) => state.busy.add(name));
  try {
    await work();
    if (done) tell(done);
    return true;
  } catch (error) {
    tell(error.message, 'bad');
    return false;
  } finally {
    update((state) => state.busy.delete(name));
  }
}

/** Asks the operator; the answer is null if there is none. */
export function question(dialog) {
  return new Promise((resolve) => {
    update((state) => {
      state.dialogs = [...state.dialogs, { ...dialog, resolve }];
    });
  });
}

export function answer(dialog, value) {
  update((state) => {
    state.dialogs = state.dialogs.filter((other) => other !== dialog);
  });
  dialog.resolve(value);
}

/** Unix seconds, by the balancer's clock. */
export const now = () => Date.now() / 1000 + state.skew;
