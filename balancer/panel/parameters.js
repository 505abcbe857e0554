// The inference parameters as a form, made from their schema. The draft holds what is typed.

import { edit } from './draft.js';
import { html, live, nothing } from './lit.js';
import { state } from './store.js';

export function parametersForm({ form, draft }, problems) {
  const changed = form.fields.filter(({ name }) => isChanged(form, draft, name)).length;
  return html`<fieldset>
    <legend>Inference parameters</legend>
    <p class="hint">
      They hold where a request says nothing else.
      ${changed ? `${changed} of ${form.fields.length} differ from the defaults.` : 'All are as by default.'}
    </p>
    <div class="parameters">
      ${form.fields.map((field) => parameter(field, draft.parameters[field.name], form, draft, problems[field.name]))}
    </div>
  </fieldset>`;
}

const isChanged = (form, draft, name) => String(draft.parameters[name]) !== String(form.defaults[name]);

const set = (name, value) => edit({ parameters: { ...state.model.draft.parameters, [name]: value } });

function parameter(field, value, form, draft, problem) {
  const { name } = field;
  const changed = isChanged(form, draft, name);
  const fallback = form.defaults[name];
  const told = [`default ${fallback === true ? 'on' : fallback === false ? 'off' : fallback}`, field.range].filter(Boolean);
  return html`<div class="parameter ${changed ? 'changed' : ''}">
    <div class="parameter-head">
      <label for="parameter-${name}">${name}</label>
      ${changed
        ? html`<span class="tag busy">changed</span>
            <button type="button" class="small" aria-label="Reset ${name}" @click=${() => set(name, fallback)}>
              Reset
            </button>`
        : nothing}
    </div>
    ${input(field, value, problem)}
    <p id="about-${name}" class=${problem ? 'problem' : 'hint'}>
      ${problem ?? html`${field.description ? html`${field.description} ` : nothing}<span class="range">${told.join(' · ')}</span>`}
    </p>
  </div>`;
}

function input(field, value, problem) {
  const id = `parameter-${field.name}`;
  const about = `about-${field.name}`;
  if (field.kind === 'switch') {
    return html`<input
      id=${id}
      type="checkbox"
      aria-describedby=${about}
      .checked=${live(value)}
      @change=${(event) => set(field.name, event.target.checked)}
    />`;
  }
  if (field.kind === 'choice') {
    return html`<select id=${id} aria-describedby=${about} @change=${(event) => set(field.name, event.target.value)}>
      ${field.choices.map((choice) => html`<option value=${choice} .selected=${choice === value}>${choice}</option>`)}
    </select>`;
  }
  return html`<input
    id=${id}
    type="text"
    inputmode=${field.kind === 'whole' && field.low >= 0 ? 'numeric' : 'text'}
    autocomplete="off"
    aria-describedby=${about}
    aria-invalid=${problem ? 'true' : nothing}
    .value=${live(String(value))}
    @input=${(event) => set(field.name, event.target.value)}
  />`;
}
