// Questions to the operator: for a key, and whether something is really to be done.

import { html, nothing } from './lit.js';
import { answer, question, state } from './store.js';

/** Returns whether the operator says yes. */
export const confirmed = async (title, text, action) =>
  (await question({ kind: 'confirm', title, text, action })) === true;

const first = () => state.dialogs[0];

export function dialogView(state) {
  const dialog = state.dialogs[0];
  return html`<dialog
    aria-labelledby="dialog-title"
    @cancel=${(event) => {
      event.preventDefault();
      answer(first(), null);
    }}
  >
    ${dialog ? (dialog.kind === 'key' ? keyForm(dialog) : confirmForm(dialog)) : nothing}
  </dialog>`;
}

let shown;

/** Opens or closes it as the state says. */
export function syncDialog(root, state) {
  const element = root.querySelector('dialog');
  const dialog = state.dialogs[0];
  if (dialog === shown) return;
  shown = dialog;
  if (!dialog) {
    element.close();
    return;
  }
  if (!element.open) element.showModal();
  element.querySelector('[data-first]').focus();
}

function keyForm(dialog) {
  const submit = (event) => {
    event.preventDefault();
    const field = event.target.elements.key;
    const key = field.value.trim();
    field.value = '';
    answer(dialog, key || null);
  };
  return html`<form @submit=${submit}>
    <h2 id="dialog-title">A key for ${dialog.role}</h2>
    <p>${dialog.why}</p>
    <label class="field">
      <span>Key</span>
      <input name="key" type="password" autocomplete="off" spellcheck="false" required data-first />
    </label>
    <p class="hint">It is kept in this tab only, until it is closed.</p>
    <p class="buttons">
      <button class="main">Use it</button>
      <button type="button" @click=${() => answer(dialog, null)}>Not now</button>
    </p>
  </form>`;
}

const confirmForm = (dialog) => html`
  <h2 id="dialog-title">${dialog.title}</h2>
  <p>${dialog.text}</p>
  <p class="buttons">
    <button class="danger" @click=${() => answer(dialog, true)}>${dialog.action}</button>
    <button data-first @click=${() => answer(dialog, null)}>Leave it</button>
  </p>
`;
