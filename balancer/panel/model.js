// The model page: what all agents are to run. A draft is edited, and put whole.

import { ask, askJson } from './api.js';
import { badge, inOrder, issues, nameOf, progress } from './agents.js';
import { draftOf, edit, wishOf } from './draft.js';
import { count, fileName, NONE } from './format.js';
import { html, live, nothing, repeat } from './lit.js';
import { parametersForm } from './parameters.js';
import { fields } from './schema.js';
import { perform, state, update } from './store.js';
import { templateForm } from './template.js';

export const title = 'Model';

const STATE = 'api/v1/balancer_desired_state';

/** The action's name. */
const PUT = 'put desired state';

state.model = {
  /** The desired state that the draft was made from, and a wish by which it was still so. */
  stored: null,
  wish: null,
  /** The latest wish that was looked at. */
  seen: null,
  form: null,
  draft: null,
  isEdited: false,
  /** What somebody else has put since the draft was begun: `{ stored, wish }`. */
  theirs: null,
  isLoading: false,
  problem: null,
};

export function enter() {
  if (!state.model.isEdited) load();
}

export function told() {
  const wish = state.data.balancer.model?.wish_number;
  const { model } = state;
  if (!model.stored || wish === undefined || wish === model.seen || state.busy.has(PUT)) return;
  load();
}

/** The draft is made anew, unless it is edited: then it is only said that it was overtaken. */
async function load() {
  if (state.model.isLoading) return;
  state.model.isLoading = true;
  // Looked at before the state is asked for, which then is of this wish or of a later one.
  const wish = state.data.balancer.model?.wish_number ?? null;
  try {
    const [stored, { schema, defaults }] = await Promise.all([askJson('GET', STATE), askJson('GET', `${STATE}/schema`)]);
    const form = { fields: fields(schema.properties.inference_parameters, schema), defaults: defaults.inference_parameters };
    update(({ model }) => {
      Object.assign(model, { form, seen: wish, problem: null });
      if (model.isEdited) compare({ stored, wish });
      else Object.assign(model, { stored, wish, draft: draftOf(stored), theirs: null });
    });
  } catch (error) {
    update(({ model }) => (model.problem = error.message));
  } finally {
    state.model.isLoading = false;
  }
}

/** Fleets count as wishes, too. Returns whether the desired state is as it was. */
function compare(current) {
  const { model } = state;
  const isSame = JSON.stringify(current.stored) === JSON.stringify(model.stored);
  if (isSame) model.wish = current.wish;
  model.theirs = isSame ? null : current;
  return isSame;
}

export function view(state) {
  const { model } = state;
  if (!model.draft) {
    return html`<p class="empty">
      ${model.problem ?? 'Loading …'} ${model.problem ? html`<button @click=${load}>Try again</button>` : nothing}
    </p>`;
  }
  const { problems } = wishOf(model);
  return html`
    <form class="model-form" novalidate @submit=${submit}>
      ${overtaken(state)} ${references(model.draft, problems)}
      ${templateForm(state)} ${parametersForm(model, problems)} ${actions(state, problems)}
    </form>
    <section aria-labelledby="swap-title">
      <h2 id="swap-title">Agents</h2>
      ${swapProgress(state)}
    </section>
  `;
}

async function submit(event) {
  event.preventDefault();
  const { wish, problems } = wishOf(state.model);
  if (Object.keys(problems).length) {
    const form = event.target;
    requestAnimationFrame(() => form.querySelector('[aria-invalid=true]')?.focus());
    return;
  }
  await perform(PUT, () => put(wish), 'The desired state is stored; the agents are told.');
}

async function put(body) {
  const { draft } = state.model;
  await putUnlessOvertaken(body);
  const wish = state.data.balancer.model?.wish_number ?? null;
  const stored = await askJson('GET', STATE);
  update(({ model }) => {
    Object.assign(model, { stored, wish, theirs: null });
    // Something may have been typed meanwhile.
    if (model.draft === draft) Object.assign(model, { draft: draftOf(stored), isEdited: false });
  });
}

/** Tried once more if only fleets have changed, or what we did ourselves is not yet told by the stream. */
async function putUnlessOvertaken(body) {
  const { model } = state;
  const attempt = () => ask('PUT', STATE, { body, headers: { 'if-match': model.wish === null ? '*' : `"${model.wish}"` } });
  try {
    await attempt();
  } catch (error) {
    if (error.status !== 409) throw error;
    const response = await ask('GET', STATE);
    // A proxy may have made it a weak one.
    const wish = Number(/\d+/.exec(response.headers.get('etag'))[0]);
    if (!compare({ wish, stored: await response.json() })) throw new Error('Somebody else has changed the desired state: nothing is stored');
    await attempt();
  }
}

function overtaken({ model }) {
  if (!model.theirs) return nothing;
  return html`<p class="banner warn">
    Somebody else has changed the desired state since you began.
    <button type="button" @click=${discard}>Drop my changes and load it</button>
    <button type="button" @click=${insist}>Keep mine, to replace it</button>
  </p>`;
}

/** The next Apply replaces what the operator has been told of, and nothing later. */
const insist = () => update(({ model }) => Object.assign(model, model.theirs, { theirs: null }));

function discard() {
  update(({ model }) => (model.isEdited = false));
  load();
}

const references = (draft, problems) => html`
  <fieldset>
    <legend>Model</legend>
    ${referenceField('model', 'Model', draft.model, problems.model, 'A path on the agents (agent:///models/a.gguf), an https address, or the address of a file on huggingface.co. Empty: none.')}
    ${referenceField('projector', 'Projector for images', draft.projector, problems.projector, 'The multimodal projector (mmproj), written in the same way. Empty: none.')}
  </fieldset>
`;

const referenceField = (name, label, value, problem, hint) => html`
  <div class="field">
    <label for="reference-${name}">${label}</label>
    <input
      id="reference-${name}"
      type="text"
      spellcheck="false"
      autocomplete="off"
      autocapitalize="off"
      .value=${live(value)}
      aria-invalid=${problem ? 'true' : nothing}
      aria-describedby="hint-${name}"
      @input=${(event) => edit({ [name]: event.target.value })}
    />
    <p id="hint-${name}" class=${problem ? 'problem' : 'hint'}>${problem ?? hint}</p>
  </div>
`;

function actions({ model, busy }, problems) {
  const number = Object.keys(problems).length;
  return html`<div class="apply">
    <button class="main" aria-disabled=${busy.has(PUT)}>Apply</button>
    <button type="button" aria-disabled=${!model.isEdited} @click=${discard}>Discard changes</button>
    <span class=${number ? 'problem' : 'hint'}>
      ${number ? `Not yet valid: ${number} field${number === 1 ? '' : 's'}.` : model.isEdited ? 'There are changes that are not applied.' : ''}
    </span>
  </div>`;
}

function swapProgress({ data, downloads }) {
  const agents = inOrder(data.agents);
  if (!agents.length) return html`<p class="empty">No agent is connected. The desired state is kept for those that come.</p>`;
  const halted = data.balancer.model?.halted_by != null;
  return html`${halted ? html`<p class="problem">The change has halted: an agent was lost while it changed its model. It goes on when one has shown that the model works, or when the state is applied again.</p>` : nothing}
  <ul class="rows">
    ${repeat(
      agents,
      (agent) => agent.id,
      (agent) => html`<li data-agent=${agent.id}>
        <div class="row-head">
          <strong>${nameOf(agent)}</strong> ${badge(agent)}
          <span class="quiet">${agent.model ?? (agent.model_path ? fileName(agent.model_path) : NONE)}</span>
          <span class="number quiet">${count(agent.slots)} slots</span>
        </div>
        ${progress(agent, downloads[agent.id])} ${issues(agent)}
      </li>`,
    )}
  </ul>`;
}
