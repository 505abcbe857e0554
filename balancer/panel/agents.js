// One agent: what it is, does and lacks, and what an operator can do with it.

import { ask } from './api.js';
import { pace } from './downloads.js';
import { bytes, count, fileName, NONE, percent, seconds, short } from './format.js';
import { html, nothing, svg } from './lit.js';
import { perform } from './store.js';

const STATES = {
  ready: ['ready', 'good'],
  draining: ['draining', 'warn'],
  held: ['drained by an operator', 'warn'],
  swapping: ['changing its model', 'busy'],
  waits_for_turn: ['serves, waits for its turn to change', 'busy'],
  downloading: ['downloading', 'busy'],
  loading: ['loading', 'busy'],
  no_model: ['no model', 'quiet'],
  stuck: ['stuck', 'bad'],
  retrying: ['trying again', 'warn'],
};

const MOST_CELLS = 64;

/** By name, then id, with the numbers in names in their order. */
export const inOrder = (agents) =>
  Object.values(agents).sort(
    (a, b) => compare(a.name ?? '', b.name ?? '') || compare(a.id, b.id),
  );

const compare = new Intl.Collator('en', { numeric: true }).compare;

export const nameOf = (agent) => agent.name ?? agent.id;

export function badge(agent) {
  const [words, tone] = STATES[agent.state] ?? [agent.state, 'quiet'];
  return html`<span class="badge ${tone}" title=${agent.held ? 'held by an operator' : nothing}>${words}</span>`;
}

export const agentCard = (agent, seen, busy) => html`
  <article class="card agent" aria-label="Agent ${nameOf(agent)}" data-agent=${agent.id}>
    <header>
      <h3>${nameOf(agent)}</h3>
      ${badge(agent)}
    </header>
    <p class="model" title=${agent.model_path ?? nothing}>
      ${agent.model ?? (agent.model_path ? fileName(agent.model_path) : 'no model')}
      ${agent.uses_chat_template_override ? html`<span class="tag">template override</span>` : nothing}
    </p>
    ${slotBar(agent)} ${cellBar(agent.figures ?? {})} ${figures(agent)} ${progress(agent, seen)} ${issues(agent)}
    <footer>
      <span class="tags">
        ${agent.fleet ? html`<span class="tag">fleet ${agent.fleet}</span>` : nothing}
        ${(agent.labels ?? []).map((label) => html`<span class="tag">${label}</span>`)}
      </span>
      ${drainButton(agent, busy)}
    </footer>
  </article>
`;

function slotBar({ slots, slots_busy: taken, slots_desired: desired }) {
  const total = Math.max(slots, taken);
  const label = `${taken} of ${slots} slots in use`;
  return html`<div class="bar-row">
    <span>Slots</span>
    ${total > MOST_CELLS
      ? html`<meter min="0" max=${total} .value=${taken} aria-label=${label}></meter>`
      : html`<div class="slots" role="img" aria-label=${label}>
          ${Array.from({ length: total }, (_, n) => html`<i class=${n < taken ? 'taken' : ''}></i>`)}
        </div>`}
    <span class="number">${taken}/${slots}${desired && desired !== slots ? ` (of ${desired})` : ''}</span>
  </div>`;
}

function cellBar({ cells_total: total, cells_running: running, cells_cached: cached }) {
  if (!total) return nothing;
  const part = (value) => Math.min(100, (100 * (value ?? 0)) / total);
  const label = `KV cells: ${count(running)} in use, ${count(cached)} cached, ${count(total)} in all`;
  return html`<div class="bar-row">
    <span>KV</span>
    <svg class="cells" viewBox="0 0 100 1" preserveAspectRatio="none" role="img" aria-label=${label}>
      ${svg`<rect class="running" x="0" y="0" height="1" width=${part(running)}></rect>
      <rect class="cached" x=${part(running)} y="0" height="1" width=${part(cached)}></rect>`}
    </svg>
    <span class="number" title=${label}>${percent(running, total)}<span class="quiet"> · ${percent(cached, total)} cached</span></span>
  </div>`;
}

function figures({ figures: told = {}, step_age: age }) {
  const prompt = (told.prompt_tokens_cached ?? 0) + (told.prompt_tokens_fed ?? 0);
  const rows = [
    ['Decode', `${short(told.decode_rate)} tok/s`],
    ['Prefill', `${short(told.prefill_rate)} tok/s`],
    ['Cache hits', percent(told.prompt_tokens_cached, prompt)],
    ['Streams', short(told.concurrency)],
    ['Waiting', count(told.waiting)],
    ['Last pass', age === null || age === undefined ? NONE : `${seconds(age)} ago`],
  ];
  return html`<dl class="figures">
    ${rows.map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}
  </dl>`;
}

export function progress(agent, seen) {
  const { download } = agent;
  if (!download) return nothing;
  const { rate, left } = pace(seen, download, Date.now() / 1000);
  const parts = [
    download.total === null ? bytes(download.current) : `${bytes(download.current)} of ${bytes(download.total)}`,
    rate === null ? null : `${bytes(rate)}/s`,
    left === null ? null : `${seconds(left)} left`,
  ];
  return html`<div class="download">
    <span class="file">${fileName(download.filename)}</span>
    ${download.total === null
      ? html`<progress aria-label="Download of ${download.filename}"></progress>`
      : html`<progress
          aria-label="Download of ${download.filename}"
          max=${download.total}
          .value=${download.current}
        ></progress>`}
    <span class="number">${parts.filter(Boolean).join(' · ')}</span>
  </div>`;
}

export const issues = (agent) =>
  agent.issues?.length
    ? html`<ul class="issues">
        ${agent.issues.map(
          (issue) => html`<li>
            <strong>${sentence(issue.kind)}</strong>
            ${issue.detail ? html`<span>${issue.detail}</span>` : nothing}
            <span class="path">${issue.model_path}</span>
          </li>`,
        )}
      </ul>`
    : nothing;

/** Such as "Model cannot be loaded" for `ModelCannotBeLoaded`. */
function sentence(kind) {
  const words = kind.replace(/([a-z])([A-Z])/g, '$1 $2').toLowerCase();
  return words.charAt(0).toUpperCase() + words.slice(1);
}

function drainButton(agent, busy) {
  const name = nameOf(agent);
  const verb = agent.held ? 'undrain' : 'drain';
  const action = `${verb} ${agent.id}`;
  const done = agent.held ? `${name} takes requests again.` : `${name} finishes what runs and takes nothing new.`;
  const work = () => ask('POST', `api/v1/agent/${encodeURIComponent(agent.id)}/${verb}`);
  return html`<button
    aria-disabled=${busy.has(action)}
    aria-label="${agent.held ? 'Undrain' : 'Drain'} ${name}"
    @click=${() => perform(action, work, done)}
  >
    ${agent.held ? 'Undrain' : 'Drain'}
  </button>`;
}
