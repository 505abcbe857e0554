// The chat template: whether the model's own is replaced, by what, and what comes out of it.

import { askJson } from './api.js';
import { inOrder } from './agents.js';
import { edit } from './draft.js';
import { html, live, nothing } from './lit.js';
import { perform, state, tell, update } from './store.js';

const SAMPLE = [
  { role: 'system', content: 'You are a helpful assistant.' },
  { role: 'user', content: 'Why is the sky blue?' },
  { role: 'assistant', content: 'Because air scatters blue light most.' },
  { role: 'user', content: 'And at sunset?' },
];

state.preview = {
  conversation: JSON.stringify(SAMPLE, null, 2),
  addsPrompt: true,
  thinks: false,
  text: null,
  problem: null,
};

export const templateForm = ({ model: { draft }, preview, busy }) => html`
  <fieldset>
    <legend>Chat template</legend>
    <label class="check">
      <input
        type="checkbox"
        .checked=${live(draft.usesTemplate)}
        @change=${(event) => edit({ usesTemplate: event.target.checked })}
      />
      Use the template below in place of the model's own
    </label>
    ${draft.usesTemplate || draft.template ? editor(draft) : nothing}
    <details class="preview">
      <summary>Preview</summary>
      ${previewForm(draft, preview, busy)}
    </details>
  </fieldset>
`;

const editor = (draft) => html`
  <div class="field">
    <label for="template">Template (Jinja)</label>
    <textarea
      id="template"
      class="code"
      rows="12"
      spellcheck="false"
      .value=${live(draft.template)}
      @input=${(event) => edit({ template: event.target.value })}
    ></textarea>
    ${draft.usesTemplate && !draft.template ? html`<p class="hint">Empty: nothing is replaced.</p>` : nothing}
    <p class="buttons">
      <button type="button" @click=${() => perform('load template', startFromModel)}>Start from the model's own</button>
    </p>
  </div>
`;

async function startFromModel() {
  const agent = inOrder(state.data.agents).find((each) => each.model_path);
  if (!agent) throw new Error('no agent has a model');
  const told = await askJson('GET', `api/v1/agent/${encodeURIComponent(agent.id)}/model_metadata`);
  const template = told?.metadata['tokenizer.chat_template'];
  if (!template) throw new Error('the model has no chat template of its own');
  edit({ template });
  tell('The template of the model is in the editor.');
}

const set = (change) => update(({ preview }) => Object.assign(preview, change));

const previewForm = (draft, preview, busy) => html`
  <div class="field">
    <label for="conversation">Conversation (JSON)</label>
    <textarea
      id="conversation"
      class="code"
      rows="8"
      spellcheck="false"
      .value=${live(preview.conversation)}
      @input=${(event) => set({ conversation: event.target.value })}
    ></textarea>
  </div>
  <p class="checks">
    <label class="check">
      <input type="checkbox" .checked=${live(preview.addsPrompt)} @change=${(event) => set({ addsPrompt: event.target.checked })} />
      Beginning of an answer
    </label>
    <label class="check">
      <input type="checkbox" .checked=${live(preview.thinks)} @change=${(event) => set({ thinks: event.target.checked })} />
      Thinking
    </label>
  </p>
  <p class="buttons">
    <button type="button" aria-disabled=${busy.has('preview')} @click=${show}>Show the prompt</button>
    <span class="hint">${draft.usesTemplate && draft.template ? 'By the template above.' : 'By the template in use.'}</span>
  </p>
  <div aria-live="polite">
    ${preview.problem ? html`<p class="problem">${preview.problem}</p>` : nothing}
    ${preview.text === null ? nothing : html`<pre class="code" tabindex="0" aria-label="The prompt">${preview.text}</pre>`}
  </div>
`;

async function show() {
  const { preview } = state;
  const { draft } = state.model;
  await perform('preview', async () => {
    try {
      const { text } = await askJson('POST', 'api/v1/chat_template_preview', {
        body: {
          template: draft.usesTemplate && draft.template ? draft.template : null,
          conversation_history: JSON.parse(preview.conversation),
          tools: [],
          add_generation_prompt: preview.addsPrompt,
          enable_thinking: preview.thinks,
        },
      });
      set({ text, problem: null });
    } catch (error) {
      set({ text: null, problem: error.message });
    }
  });
}
