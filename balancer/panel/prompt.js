// The prompt page: a conversation with a model over the websocket.

import { fail, hear, isOpen, MOST_BYTES, newAnswer, request, size, stop } from './conversation.js';
import { short } from './format.js';
import { forget, send, stopResponding } from './inference_socket.js';
import { html, live, nothing, repeat } from './lit.js';
import { messageView } from './message.js';
import { state, tell, update } from './store.js';

export const title = 'Prompt';

state.prompt = {
  messages: [],
  text: '',
  images: [],
  system: '',
  model: '',
  maxTokens: '512',
  temperature: '',
  thinks: false,
  /** Told to those who do not see it. */
  said: '',
};

const set = (change) => update(({ prompt }) => Object.assign(prompt, change));

const seconds = () => performance.now() / 1000;

export const view = ({ prompt, data }) => html`
  <div class="chat">
    ${options(prompt, data.balancer.model?.models ?? [])}
    <div class="messages" role="log" tabindex="0" aria-live="off" aria-label="Conversation">
      ${prompt.messages.length
        ? repeat(prompt.messages, (message) => message.id, messageView)
        : html`<p class="empty">Nothing has been said yet.</p>`}
    </div>
    <p class="hidden" role="status">${prompt.said}</p>
    ${composer(prompt)}
  </div>
`;

/** Keeps the newest text in sight, for whoever was there. */
export function drawn(root, { prompt }) {
  const messages = root.querySelector('.messages');
  const answer = prompt.messages.at(-1);
  if (!messages || !answer || answer.state !== 'writing') return;
  const left = messages.scrollHeight - messages.clientHeight - messages.scrollTop;
  if (left < 120) messages.scrollTop = messages.scrollHeight;
}

const options = (prompt, models) => html`
  <details class="options">
    <summary>Options</summary>
    <div class="parameters">
      <div class="field">
        <label for="prompt-model">Model</label>
        <select id="prompt-model" @change=${(event) => set({ model: event.target.value })}>
          <option value="">any</option>
          ${models.map((names) => html`<option value=${names[0]} .selected=${names[0] === prompt.model}>${names[0]}</option>`)}
        </select>
      </div>
      ${numberField('prompt-max-tokens', 'Max tokens', prompt.maxTokens, '', (maxTokens) => set({ maxTokens }))}
      ${numberField('prompt-temperature', 'Temperature', prompt.temperature, 'as the desired state says', (temperature) => set({ temperature }))}
      <label class="check">
        <input type="checkbox" .checked=${live(prompt.thinks)} @change=${(event) => set({ thinks: event.target.checked })} />
        Thinking
      </label>
      <div class="field wide">
        <label for="prompt-system">System prompt</label>
        <textarea id="prompt-system" rows="2" .value=${live(prompt.system)} @input=${(event) => set({ system: event.target.value })}></textarea>
      </div>
    </div>
  </details>
`;

const numberField = (id, label, value, placeholder, change) => html`<div class="field">
  <label for=${id}>${label}</label>
  <input id=${id} type="text" inputmode="decimal" autocomplete="off" placeholder=${placeholder} .value=${live(value)} @input=${(event) => change(event.target.value)} />
</div>`;

function composer(prompt) {
  const answer = prompt.messages.at(-1);
  const isRunning = answer !== undefined && answer.role === 'assistant' && isOpen(answer);
  return html`<form class="composer" @submit=${submit}>
    ${prompt.images.length
      ? html`<ul class="thumbnails">
          ${prompt.images.map(
            (url, n) => html`<li>
              <img src=${url} alt="Image ${n + 1}" />
              <button type="button" class="small" aria-label="Remove image ${n + 1}" @click=${() => set({ images: state.prompt.images.filter((other) => other !== url) })}>×</button>
            </li>`,
          )}
        </ul>`
      : nothing}
    <label class="hidden" for="prompt-text">Message</label>
    <textarea id="prompt-text" rows="3" placeholder="Message" aria-describedby="prompt-hint" .value=${live(prompt.text)} @input=${(event) => set({ text: event.target.value })} @keydown=${enterSends}></textarea>
    <p class="buttons">
      <button class="main" aria-disabled=${isRunning || !(prompt.text.trim() || prompt.images.length)}>Send</button>
      <button type="button" aria-disabled=${!isRunning} @click=${stopAnswer}>Stop</button>
      <label class="button">
        <input class="hidden" type="file" accept="image/*" multiple @change=${addImages} />
        Add images
      </label>
      <button type="button" aria-disabled=${isRunning || !prompt.messages.length} @click=${clear}>New conversation</button>
      <span id="prompt-hint" class="hint">Enter sends, Shift and Enter begin a new line.</span>
    </p>
  </form>`;
}

function enterSends(event) {
  if (event.key !== 'Enter' || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  event.target.form.requestSubmit();
}

async function addImages(event) {
  const files = [...event.target.files];
  event.target.value = '';
  // Before they are read: they are sent as text, a third longer.
  const length = files.reduce((sum, file) => sum + (file.size * 4) / 3, 0);
  if (length > MOST_BYTES) {
    refuse(length);
    return;
  }
  const added = await Promise.all(files.map(dataUri));
  const images = [...state.prompt.images, ...added];
  if (isSmall(request('', withQuestion({ ...state.prompt, images }), wanted()))) set({ images });
}

/** Whether the balancer takes it; if not, the operator is told. */
function isSmall(message) {
  const bytes = size(message);
  if (bytes > MOST_BYTES) refuse(bytes);
  return bytes <= MOST_BYTES;
}

const refuse = (bytes) =>
  tell(
    `This would be a message of ${short(bytes / 1e6)} MB, with all that was said and shown before; at most ` +
      `${MOST_BYTES / 1e6} MB can be sent. Use smaller images or fewer, or begin a new conversation.`,
    'bad',
  );

const dataUri = (file) =>
  new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener('load', () => resolve(reader.result));
    reader.addEventListener('error', () => reject(reader.error));
    reader.readAsDataURL(file);
  });

function submit(event) {
  event.preventDefault();
  const { prompt } = state;
  const last = prompt.messages.at(-1);
  if ((last?.role === 'assistant' && isOpen(last)) || !(prompt.text.trim() || prompt.images.length)) return;
  const { maxTokens, temperature } = wanted();
  if (!Number.isInteger(maxTokens) || maxTokens < 1 || Number.isNaN(temperature)) {
    tell('Max tokens is a whole number above 0, the temperature a number.', 'bad');
    return;
  }
  const id = newId();
  const messages = withQuestion(prompt);
  const message = request(id, messages, wanted());
  if (!isSmall(message)) return;
  begin(id, message, messages);
  set({ text: '', images: [], said: 'Sent.' });
}

const wanted = () => ({
  ...state.prompt,
  maxTokens: Number(state.prompt.maxTokens),
  temperature: state.prompt.temperature.trim() === '' ? null : Number(state.prompt.temperature),
});

/** What was said, and what would be said next. */
const withQuestion = ({ messages, text, images }) => [...messages, { id: newId(), role: 'user', text: text.trim(), images }];

/** `randomUUID` is there only in pages that came over TLS or from this machine. */
const newId = () => `panel-${Date.now().toString(36)}-${Math.random().toString(36).slice(2, 10)}`;

function begin(id, message, messages) {
  set({ messages: [...messages, newAnswer(id, seconds())] });
  const change = (next) =>
    update(({ prompt }) => {
      prompt.messages = prompt.messages.map((message) => (message.id === id ? next(message) : message));
      const answer = prompt.messages.find((message) => message.id === id);
      if (answer && !isOpen(answer)) prompt.said = `The answer is ${answer.state}.`;
      if (answer === undefined || answer.usage || answer.state === 'failed') forget(id);
    });
  const lost = (why) => change((answer) => fail(answer, why, seconds()));
  send(id, message, {
    hear: (message) => change((answer) => hear(answer, message, seconds())),
    lost,
  }).catch((error) => lost(error.message));
}

function clear() {
  const last = state.prompt.messages.at(-1);
  if (!last || last.role === 'user' || !isOpen(last)) set({ messages: [] });
}

function stopAnswer() {
  const last = state.prompt.messages.at(-1);
  if (last?.role !== 'assistant' || !isOpen(last)) return;
  const { id } = last;
  stopResponding(id);
  update(({ prompt }) => {
    prompt.messages = prompt.messages.map((message) => (message.id === id ? stop(message, seconds()) : message));
    prompt.said = 'The answer is stopped.';
  });
}
