// The requests page: what waits, runs and is lately over, and what was decided for one of them and why.

import { ask, askJson } from './api.js';
import { clock, count, NONE, seconds, words } from './format.js';
import { html, live, nothing, repeat } from './lit.js';
import { now, perform, state, update } from './store.js';

export const title = 'Requests';

const RANK = { running: 0, waiting: 1, over: 2 };

/** What runs, then the queue as it is served, then what is over, the latest first. Pure. */
export const inTurn = (requests) =>
  Object.values(requests).sort(
    (a, b) =>
      RANK[a.state] - RANK[b.state] ||
      (a.state === 'waiting' ? a.arrived - b.arrived : b.arrived - a.arrived) ||
      compare(a.id, b.id),
  );

state.requests = {
  /** What is typed into the field that looks one up. */
  wanted: '',
  /** The request whose decisions are shown. */
  shown: null,
  problem: null,
};

/** What the shown request was like when its decisions were asked for. */
let askedFor = null;

/** Milliseconds between looks at a request that the status stream says nothing of. */
const PAUSE = 2000;
let again;

export function enter() {
  askedFor = null;
  clearTimeout(again);
  update(({ requests }) => Object.assign(requests, { shown: null, problem: null }));
  told();
}

/** Asks for the decisions again whenever something was decided. */
export function told() {
  const id = state.argument;
  if (id === null) return;
  const value = state.data.requests[id];
  const mark = value ? [id, value.state, value.agent_id, value.moves, value.first_token, value.why].join() : id;
  if (mark === askedFor) return;
  askedFor = mark;
  load(id);
}

async function load(id) {
  let shown = null;
  let problem = null;
  let isOver = true;
  try {
    shown = await askJson('GET', `api/v1/requests/${encodeURIComponent(id)}`);
    isOver = shown.state === 'over';
  } catch (error) {
    isOver = error.status !== 0;
    problem = error.status === 404 ? `There is no request ${id}, or it was too long ago.` : error.message;
  }
  if (!isShown(id)) return;
  update(({ requests }) => Object.assign(requests, { shown, problem }));
  clearTimeout(again);
  if (!isOver) again = setTimeout(() => isShown(id) && !state.data.requests[id] && load(id), PAUSE);
}

const isShown = (id) => state.page === 'requests' && state.argument === id;

export function view(state) {
  const all = inTurn(state.data.requests);
  return html`
    ${summary(state)} ${lookUp(state.requests)}
    ${state.argument !== null && !state.data.requests[state.argument] ? explained(state) : nothing}
    ${all.length ? table(all, state) : html`<p class="empty">There has been no request lately.</p>`}
  `;
}

const compare = (a, b) => (a < b ? -1 : a > b ? 1 : 0);

function summary({ data }) {
  const told = data.balancer.requests;
  if (!told) return nothing;
  const over = Object.entries(told.over).map(([outcome, number]) => `${count(number)} ${words(outcome)}`);
  return html`<p class="summary">
    ${count(told.waiting)} waiting, ${count(told.running)} running${told.cancelling ? `, ${count(told.cancelling)} being cancelled` : ''}.
    ${over.length ? `Since the start: ${over.join(', ')}.` : ''}
  </p>`;
}

const lookUp = ({ wanted }) => html`<form class="look-up" @submit=${explain}>
  <label for="wanted">Request id</label>
  <input id="wanted" type="text" spellcheck="false" autocomplete="off" autocapitalize="off" .value=${live(wanted)} @input=${(event) => update(({ requests }) => (requests.wanted = event.target.value))} />
  <button>Explain</button>
</form>`;

function explain(event) {
  event.preventDefault();
  const wanted = state.requests.wanted.trim();
  if (wanted) location.hash = `requests/${encodeURIComponent(wanted)}`;
}

/** Roles are said since the rows are laid out as blocks on phones, where tables would lose theirs. */
const table = (all, state) => html`
  <table class="requests" role="table" aria-label="Requests">
    <thead role="rowgroup">
      <tr role="row">
        ${COLUMNS.map(([name]) => html`<th role="columnheader" scope="col">${name}</th>`)}
        <th role="columnheader" scope="col"><span class="hidden">Actions</span></th>
      </tr>
    </thead>
    <tbody role="rowgroup">
      ${repeat(all, (request) => request.id, (request) => [row(request, state), request.id === state.argument ? explanation(state) : nothing])}
    </tbody>
  </table>
`;

const COLUMNS = [
  ['Request', (request, isShown) => link(request, isShown)],
  ['State', (request) => stateBadge(request)],
  ['Route', (request) => request.route],
  ['Model', (request) => request.model ?? NONE],
  ['Agent', (request) => request.agent ?? NONE],
  ['Waited', (request) => waited(request)],
  ['Prompt', (request) => prompt(request)],
  ['Tokens', (request) => count(request.tokens)],
  ['First token', (request) => seconds(request.first_token)],
  ['Time', (request) => seconds(request.ended ?? now() - request.arrived)],
];

const row = (request, { argument, busy }) => html`
  <tr role="row" class=${request.state} data-request=${request.id}>
    ${COLUMNS.map(([name, show]) => html`<td role="cell" data-label=${name}>${show(request, argument === request.id)}</td>`)}
    <td role="cell" class="actions">
      ${request.state === 'over'
        ? nothing
        : html`<button class="small" aria-label="Cancel request ${request.id}" aria-disabled=${busy.has(`cancel ${request.id}`)} @click=${() => cancel(request.id)}>
            Cancel
          </button>`}
    </td>
  </tr>
`;

const explanation = (state) => html`<tr role="row" class="explanation">
  <td role="cell" colspan=${COLUMNS.length + 1}>${explained(state)}</td>
</tr>`;

const link = ({ id, arrived }, isShown) => html`
  <a href="#requests${isShown ? '' : `/${encodeURIComponent(id)}`}" aria-expanded=${isShown ? 'true' : 'false'} title=${id}>${id.slice(0, 8)}</a>
  <time class="quiet">${clock(arrived)}</time>
`;

function stateBadge({ state, outcome, message }) {
  if (state !== 'over') return html`<span class="badge ${state === 'waiting' ? 'warn' : 'busy'}">${state}</span>`;
  const isCancelled = outcome?.startsWith('cancelled');
  const tone = outcome === 'stop' || outcome === 'length' ? 'good' : isCancelled ? 'quiet' : 'bad';
  return html`<span class="badge ${tone}" title=${message ?? nothing}>${words(outcome ?? 'over')}</span>`;
}

function waited(request) {
  const time = request.state === 'waiting' ? now() - request.arrived : request.waited;
  return html`${seconds(time)} ${request.why ? html`<span class="why">${request.why}</span>` : nothing}`;
}

function prompt({ prompt_tokens: all, cached_tokens: cached }) {
  return html`${count(all)}${cached ? html` <span class="quiet">(${count(cached)} cached)</span>` : nothing}`;
}

const cancel = (id) =>
  perform(`cancel ${id}`, () => ask('DELETE', `api/v1/requests/${encodeURIComponent(id)}`), 'The request is cancelled.');

function explained({ argument, requests: { shown, problem } }) {
  return html`<section class="card explained" aria-labelledby="explained-title">
    <header>
      <h2 id="explained-title">Request ${argument}</h2>
      <a class="button" href="#requests">Close</a>
    </header>
    <div aria-live="polite">
      ${problem ? html`<p class="problem">${problem}</p>` : nothing}
      ${shown
        ? html`<p>
              ${shown.route}, priority ${shown.priority}${shown.moves ? `, moved ${shown.moves} times` : ''}.
              ${shown.message ? html`<span class="problem">${shown.message}</span>` : nothing}
            </p>
            <ol class="decisions">
              ${shown.decisions.map(
                (decision) => html`<li>
                  <span class="number">${seconds(decision.at)}</span>
                  <strong>${words(decision.what)}</strong>
                  <span class="quiet">${decision.by}${decision.agent ? `, ${decision.agent}` : ''}</span>
                  <span class="text">${decision.why}</span>
                </li>`,
              )}
            </ol>`
        : nothing}
    </div>
  </section>`;
}
