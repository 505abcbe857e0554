// One message of a conversation. All that people and models have written is shown as text.

import { timings } from './conversation.js';
import { count, seconds, short } from './format.js';
import { html, nothing } from './lit.js';

const STATES = { waiting: 'waits …', writing: 'writes …', stopped: 'stopped', failed: 'failed' };

export const messageView = (message) => (message.role === 'user' ? question(message) : answer(message));

const question = ({ text, images }) => html`<article class="message user" aria-label="You">
  ${images.length ? html`<div class="thumbnails">${images.map((url, n) => html`<img src=${url} alt="Image ${n + 1}" />`)}</div>` : nothing}
  <div class="text">${text}</div>
</article>`;

const answer = (message) => html`<article class="message assistant ${message.state}" aria-label="Answer" aria-busy=${message.state === 'writing' ? 'true' : 'false'}>
  ${message.thoughts
    ? html`<details class="thoughts" ?open=${!message.text && message.state === 'writing'}>
        <summary>Thoughts</summary>
        <div class="text">${message.thoughts}</div>
      </details>`
    : nothing}
  <div class="text">${message.text}</div>
  ${message.calls ? html`<div class="calls"><strong>Tool calls</strong><pre>${message.calls}</pre></div>` : nothing}
  ${message.problem ? html`<p class="problem">${message.problem}</p>` : nothing}
  <p class="facts">${facts(message)}</p>
</article>`;

function facts(message) {
  const { firstToken, tokens, rate } = timings(message);
  const { usage } = message;
  return [
    STATES[message.state],
    message.agent,
    firstToken === null ? null : `first token after ${seconds(firstToken)}`,
    rate === null ? null : `${short(rate)} tok/s`,
    tokens === null ? null : `${count(tokens)} tokens`,
    usage?.reasoning_tokens ? `${count(usage.reasoning_tokens)} of them thoughts` : null,
    usage ? `prompt ${count(usage.prompt_tokens)} tokens, ${count(usage.cached_prompt_tokens)} cached` : null,
    usage?.input_image_tokens ? `${count(usage.input_image_tokens)} of images` : null,
  ]
    .filter(Boolean)
    .join(' · ');
}
