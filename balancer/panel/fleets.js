// The fleets page: what is wanted of each fleet, what is there, and why the two differ.

import { ask } from './api.js';
import { confirmed } from './dialog.js';
import { fleetForm, isOvertaken, openForm, PUT } from './fleet_form.js';
import { count, NONE, plural, seconds, words } from './format.js';
import { html, live, nothing, repeat } from './lit.js';
import { showReference } from './reference.js';
import { perform, state, update } from './store.js';

export const title = 'Fleets';

/** Behind the page's name in the address: a name that no fleet can have. */
const NEW = '+new';

state.fleets = {
  /** What is typed as new bounds, by fleet. */
  bounds: {},
  /** The open form. */
  form: null,
};

export function enter() {
  const { argument } = state;
  const fleet = state.data.fleets[argument]?.fleet;
  if (argument === NEW) openForm(null, null);
  else if (fleet) openForm(argument, fleet);
  else update(({ fleets }) => (fleets.form = null));
}

/** A form may have been asked for by the address before its fleet was known, or show what is no more. */
export function told() {
  const { argument, busy, fleets } = state;
  if (argument === null || argument === NEW || busy.has(PUT)) return;
  if (fleets.form === null || (!fleets.form.isEdited && isOvertaken(state))) enter();
}

export const view = (state) => html`
  ${state.fleets.form
    ? fleetForm(state)
    : state.argument !== null
      ? html`<p class="empty">There is no fleet ${state.argument}. <a href="#fleets">All fleets</a></p>`
      : html`<p><a class="button" href="#fleets/${NEW}">New fleet</a></p>`}
  ${list(state)}
`;

function list(state) {
  const names = Object.keys(state.data.fleets).sort();
  if (!names.length) {
    return html`<p class="empty">There is no fleet. Agents that dial in by themselves need none.</p>`;
  }
  return html`<div class="fleets">
    ${repeat(names, (name) => name, (name) => fleetCard(name, state.data.fleets[name], state))}
  </div>`;
}

const fleetCard = (name, told, state) => html`
  <article class="card fleet" aria-label="Fleet ${name}" data-fleet=${name}>
    <header>
      <h2>${name}</h2>
      ${condition(told)}
    </header>
    <p class="model">${told.fleet.model ? showReference(told.fleet.model) : 'the model of the desired state'}</p>
    ${told.reason ? html`<p class=${told.is_stuck ? 'problem' : 'reason'}>${told.reason}</p>` : nothing}
    <dl class="figures">
      ${[
        ['Wanted', count(told.wanted)],
        ['Seen', count(told.seen)],
        ['Ready', count(told.ready)],
        ['Starting', count(told.starting)],
        ['Draining', count(told.draining)],
        ['Requests waiting', count(told.waiting)],
      ].map(([term, value]) => html`<div><dt>${term}</dt><dd>${value}</dd></div>`)}
    </dl>
    ${members(told.agents ?? [])} ${scaling(name, told.fleet, state)}
    <footer>
      <a class="button" href="#fleets/${name}" aria-label="Edit the fleet ${name}">Edit</a>
      <button class="danger" aria-label="Delete the fleet ${name}" aria-disabled=${state.busy.has(`delete ${name}`)} @click=${() => remove(name, told)}>
        Delete
      </button>
    </footer>
  </article>
`;

function condition({ wanted, ready, is_stuck: isStuck, lacks_node: lacksNode }) {
  if (isStuck) return html`<span class="badge bad">stuck</span>`;
  if (lacksNode) return html`<span class="badge warn">waits for a node</span>`;
  if (wanted === null) return html`<span class="badge quiet">not reported yet</span>`;
  if (ready === wanted) return html`<span class="badge good">as wanted</span>`;
  return html`<span class="badge busy">${ready < wanted ? 'growing' : 'shrinking'}</span>`;
}

const members = (agents) =>
  agents.length
    ? html`<ul class="members">
        ${repeat(
          agents,
          (agent) => agent.name,
          (agent) => html`<li>
            <strong>${agent.name}</strong>
            <span class="badge ${agent.phase === 'ready' ? 'good' : 'busy'}">${words(agent.phase)}</span>
            <span class="quiet">${phases(agent.seconds)}</span>
            ${agent.problem ? html`<p class="problem">${agent.problem}</p>` : nothing}
          </li>`,
        )}
      </ul>`
    : nothing;

const phases = (told) =>
  Object.entries(told ?? {})
    .map(([phase, time]) => `${words(phase)} ${seconds(time)}`)
    .join(' · ') || NONE;

function scaling(name, fleet, { fleets, busy }) {
  const typed = boundsOf(name, fleet, fleets);
  const isSame = typed.min === String(fleet.min) && typed.max === String(fleet.max);
  const bound = (key) => html`<label class="inline">
    ${key}
    <input
      type="number"
      min="0"
      max="1024"
      required
      aria-label="${key} of the fleet ${name}"
      .value=${live(typed[key])}
      @input=${(event) => type(name, key, event.target.value)}
    />
  </label>`;
  return html`<form class="scale" @submit=${(event) => scale(event, name)}>
    ${bound('min')} ${bound('max')}
    <button aria-disabled=${isSame || busy.has(`scale ${name}`)} aria-label="Scale the fleet ${name}">Scale</button>
  </form>`;
}

const boundsOf = (name, { min, max }, fleets) => ({ min: String(min), max: String(max), ...fleets.bounds[name] });

const type = (name, key, text) =>
  update(({ fleets }) => {
    fleets.bounds = { ...fleets.bounds, [name]: { ...fleets.bounds[name], [key]: text } };
  });

async function scale(event, name) {
  event.preventDefault();
  const { fleet } = state.data.fleets[name];
  const { min, max } = boundsOf(name, fleet, state.fleets);
  const body = { min: Number(min), max: Number(max) };
  if (body.min === fleet.min && body.max === fleet.max) return;
  const done = `The fleet ${name} is to have from ${min} to ${plural(body.max, 'agent')}.`;
  const work = () => ask('PATCH', `api/v1/fleets/${name}`, { body });
  if (await perform(`scale ${name}`, work, done)) update(({ fleets }) => delete fleets.bounds[name]);
}

async function remove(name, told) {
  const text = `Its ${plural(told.seen, 'agent')} will finish what runs, and go.`;
  if (!(await confirmed(`Delete the fleet ${name}?`, text, 'Delete it'))) return;
  await perform(`delete ${name}`, () => ask('DELETE', `api/v1/fleets/${name}`), `The fleet ${name} is deleted.`);
  if (state.argument === name) location.hash = 'fleets';
}
