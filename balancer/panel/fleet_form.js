// The form of a fleet, with all its keys.

import { ask } from './api.js';
import { draftOf, fleetOf, GROUPS } from './fleet_fields.js';
import { html, live, nothing } from './lit.js';
import { perform, state, update } from './store.js';

const NAME = /^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$/;

/** `name` and `fleet` are null for a new one. */
export const openForm = (name, fleet) =>
  update(({ fleets }) => {
    fleets.form = { name, before: fleet, newName: '', draft: draftOf(fleet), wasSent: false };
  });

const edit = (change) =>
  update(({ fleets }) => {
    fleets.form = { ...fleets.form, ...change };
  });

const set = (path, value) => edit({ draft: { ...state.fleets.form.draft, [path]: value } });

function nameProblem({ name, newName }) {
  if (name !== null || NAME.test(newName)) return undefined;
  return 'Up to 40 small letters, digits and hyphens between them';
}

export function fleetForm({ fleets: { form }, busy }) {
  const { problems } = fleetOf(form.draft, form.before);
  const wrongName = nameProblem(form);
  // What was never touched is not yet complained about.
  const isTold = form.wasSent || form.newName !== '';
  return html`<form class="card fleet-form" novalidate aria-labelledby="fleet-form-title" @submit=${submit}>
    <h2 id="fleet-form-title">${form.name === null ? 'New fleet' : `Fleet ${form.name}`}</h2>
    ${form.name === null
      ? textField('name', 'Name', form.newName, isTold ? wrongName : undefined, 'Part of the names of its agents.', (value) => edit({ newName: value }))
      : nothing}
    ${textField('model', 'Model', form.draft.model, problems.model, 'A path, https address or file on huggingface.co. Empty: the model of the desired state.', (value) => set('model', value))}
    ${GROUPS.map(
      (group) => html`<fieldset>
        <legend>${group.title}</legend>
        <div class="parameters">
          ${group.fields.map((field) => fieldView(form, field, group.key === null ? field.name : `${group.key}.${field.name}`, problems))}
        </div>
      </fieldset>`,
    )}
    <p class="buttons">
      <button class="main" aria-disabled=${busy.has('put fleet')}>${form.name === null ? 'Create' : 'Apply'}</button>
      <a class="button" href="#fleets">Close</a>
    </p>
  </form>`;
}

function fieldView(form, field, path, problems) {
  const value = form.draft[path];
  const about = html`${field.about} <span class="range">${field.range}</span>`;
  const change = (text) => set(path, text);
  if (field.kind !== 'choice') return textField(path, field.name, value, problems[path], about, change);
  return html`<div class="field">
    <label for="fleet-${path}">${field.name}</label>
    <select id="fleet-${path}" @change=${(event) => change(event.target.value)}>
      ${field.choices.map((each) => html`<option value=${each} .selected=${each === value}>${each || 'not said'}</option>`)}
    </select>
  </div>`;
}

const textField = (path, label, value, problem, hint, change) => html`<div class="field">
  <label for="fleet-${path}">${label}</label>
  <input
    id="fleet-${path}"
    type="text"
    spellcheck="false"
    autocomplete="off"
    autocapitalize="off"
    aria-describedby="about-fleet-${path}"
    aria-invalid=${problem ? 'true' : nothing}
    .value=${live(value)}
    @input=${(event) => change(event.target.value)}
  />
  <p id="about-fleet-${path}" class=${problem ? 'problem' : 'hint'}>${problem ?? hint}</p>
</div>`;

async function submit(event) {
  event.preventDefault();
  const { form } = state.fleets;
  const { fleet, problems } = fleetOf(form.draft, form.before);
  if (nameProblem(form) || Object.keys(problems).length) {
    const element = event.target;
    edit({ wasSent: true });
    requestAnimationFrame(() => element.querySelector('[aria-invalid=true]')?.focus());
    return;
  }
  const name = form.name ?? form.newName;
  if (form.name === null && state.data.fleets[name]) {
    await perform('put fleet', () => Promise.reject(new Error(`There is a fleet ${name} already.`)));
    return;
  }
  const work = () => ask('PUT', `api/v1/fleets/${name}`, { body: fleet });
  if (await perform('put fleet', work, `The fleet ${name} is stored.`)) location.hash = 'fleets';
}
