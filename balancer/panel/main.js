// The panel: which page is shown, when it is drawn, and the status stream that it lives on.

import { ask } from './api.js';
import { drawCharts } from './charts.js';
import * as dashboard from './dashboard.js';
import { syncDialog } from './dialog.js';
import { observe } from './downloads.js';
import * as fleets from './fleets.js';
import { render } from './lit.js';
import * as model from './model.js';
import * as prompt from './prompt.js';
import * as requests from './requests.js';
import { shell } from './shell.js';
import { link, now, onChange, state, update } from './store.js';
import { apply, follow, pauseAfter } from './stream.js';

const pages = { dashboard, model, fleets, prompt, requests };

const root = document.getElementById('panel');

function draw() {
  render(shell(state, pages), root);
  syncDialog(root, state);
  drawCharts(root, state);
  pages[state.page].drawn?.(root, state);
}

/** From the address: `#PAGE` or `#PAGE/ARGUMENT`. */
function route() {
  const [name, ...rest] = location.hash.slice(1).split('/');
  const page = Object.hasOwn(pages, name) ? name : 'dashboard';
  const isAnother = page !== state.page;
  update((state) => {
    state.page = page;
    state.argument = rest.length ? decoded(rest.join('/')) : null;
  });
  document.title = `${pages[page].title} · headrace`;
  pages[page].enter?.(state);
  if (isAnother) {
    draw();
    root.querySelector('h1').focus();
    scrollTo(0, 0);
  }
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

/** Without a key there is nothing to try by itself. */
function pause(failures, signal) {
  return new Promise((resolve) => {
    const timer = state.link.phase === 'locked' ? 0 : setTimeout(resolve, pauseAfter(failures, Math.random()));
    signal.addEventListener('abort', () => {
      clearTimeout(timer);
      resolve();
    });
  });
}

function take(event) {
  update((state) => {
    const before = state.data;
    state.data = apply(before, event);
    // Only of what has just happened: a snapshot's newest may be some seconds old.
    const newest = event.event === 'change' && Object.values(event.told.history ?? {}).at(-1);
    if (newest) state.skew = newest.at - Date.now() / 1000;
    if (state.data.agents !== before.agents) {
      state.downloads = observe(state.downloads, state.data.agents, Date.now() / 1000);
    }
  });
  pages[state.page].told?.(state);
}

onChange(draw);
addEventListener('hashchange', route);
addEventListener('online', () => link.retry());
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => update());
// Times that run on.
setInterval(() => document.hidden || update(), 1000);
draw();
route();

const stream = follow({
  open: (lastId, signal) =>
    ask('GET', 'api/v1/events', { headers: lastId ? { 'last-event-id': lastId } : {}, signal }),
  take,
  opened: () => update((state) => (state.link = { phase: 'live', since: now(), reason: null })),
  broken: (error) =>
    update((state) => {
      // The balancer ends the stream now and then: nothing to speak of if it comes back at once.
      if (error === null && state.link.phase === 'live') return;
      const isLocked = error?.wantsKey === true;
      const since = state.link.phase === 'live' ? Date.now() / 1000 : (state.link.since ?? Date.now() / 1000);
      state.link = {
        phase: isLocked ? 'locked' : 'broken',
        since,
        reason: error?.message ?? 'the balancer has ended the status stream',
      };
    }),
  pause,
  isHeld: () => state.dialogs.some((dialog) => dialog.kind === 'key'),
});
Object.assign(link, stream);
