// The form of a fleet, with all its keys.

import { ask } from './api.js';
import { changesOf, draftOf, fleetOf, GROUPS } from './fleet_fields.js';
import { html, live, nothing } from './lit.js';
import { perform, state, update } from './store.js';

const NAME = /^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$/;

/** The action's name. */
export const PUT = 'put fleet';

/** `name` and `fleet` are null for a new one. */
export const openForm = (name, fleet) =>
  update(({ fleets }) => {
    fleets.form = { name, before: fleet, newName: '', draft: draftOf(fleet), isEdited: false, wasSent: false };
  });

const edit = (change) =>
  update(({ fleets }) => {
    fleets.form = { ...fleets.form, ...change };
  });

const set = (path, value) => edit({ isEdited: true, draft: { ...state.fleets.form.draft, [path]: value } });

/** Whether the fleet is no more as it was when the form was opened. */
export const isOvertaken = ({ fleets: { form }, data }) =>
  form.name !== null && JSON.stringify(data.fleets[form.name]?.fleet) !== JSON.stringify(form.before);

function overtaken(state) {
  const { form } = state.fleets;
  if (state.busy.has(PUT) || !isOvertaken(state)) return nothing;
  const fleet = state.data.fleets[form.name]?.fleet;
  if (!fleet) return html`<p class="banner warn">Somebody else has deleted this fleet since you began.</p>`;
  return html`<p class="banner warn">
    Somebody else has changed this fleet since you began. Apply changes only what you have changed.
    <button type="button" @click=${() => openForm(form.name, state.data.fleets[form.name].fleet)}>Drop my changes and load it</button>
  </p>`;
}

function nameProblem({ name, newName }) {
  if (name !== null || NAME.test(newName)) return undefined;
  return 'Up to 40 small letters, digits and hyphens between them';
}

export function fleetForm(state) {
  const { form } = state.fleets;
  const { problems } = fleetOf(form.draft, form.before);
  const wrongName = nameProblem(form);
  // What was never touched is not yet complained about.
  const isTold = form.wasSent || form.newName !== '';
  return html`<form class="card fleet-form" novalidate aria-labelledby="fleet-form-title" @submit=${submit}>
    <h2 id="fleet-form-title">${form.name === null ? 'New fleet' : `Fleet ${form.name}`}</h2>
    ${overtaken(state)}
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
      <button class="main" aria-disabled=${state.busy.has(PUT)}>${form.name === null ? 'Create' : 'Apply'}</button>
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
    await perform(PUT, () => Promise.reject(new Error(`There is a fleet ${name} already.`)));
    return;
  }
  const work =
    form.name === null
      ? () => ask('PUT', `api/v1/fleets/${name}`, { body: fleet })
      : () => ask('PATCH', `api/v1/fleets/${name}`, { body: changesOf(form.draft, form.before, state.data.fleets[name]?.fleet) });
  if (await perform(PUT, work, `The fleet ${name} is stored.`)) location.hash = 'fleets';
}
