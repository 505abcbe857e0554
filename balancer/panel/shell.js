// What is around every page: the head with its links, the state of the connection, and messages.

import { dialogView } from './dialog.js';
import { clock } from './format.js';
import { html, nothing, repeat } from './lit.js';
import { dismiss, link } from './store.js';

export function shell(state, pages) {
  return html`
    <a class="skip" href="#${state.page}" @click=${toContent}>Skip to the content</a>
    <header class="head">
      <span class="brand">headrace</span>
      <nav aria-label="Pages">
        ${Object.entries(pages).map(
          ([name, page]) => html`
            <a href="#${name}" aria-current=${name === state.page ? 'page' : nothing}>${page.title}</a>
          `,
        )}
      </nav>
    </header>
    <div class="banners" role="status">${banner(state)}</div>
    <main id="content" tabindex="-1">
      <h1 tabindex="-1">${pages[state.page].title}</h1>
      ${pages[state.page].view(state)}
    </main>
    <div class="notices" role="status">${repeat(state.notices, (notice) => notice.number, noticeView)}</div>
    ${dialogView(state)}
  `;
}

function toContent(event) {
  event.preventDefault();
  document.getElementById('content').focus();
}

function banner(state) {
  const { phase, since, reason } = state.link;
  const { about } = state.data.balancer;
  if (phase === 'connecting') return html`<p class="banner">Connecting to the balancer …</p>`;
  if (phase === 'locked') {
    return html`<p class="banner bad">
      The balancer wants a key: ${reason} <button @click=${() => link.retry()}>Enter a key</button>
    </p>`;
  }
  if (phase === 'broken') {
    return html`<p class="banner bad">
      No connection to the balancer since ${clock(since)}: ${reason}. What is shown is as it was then. It is
      tried again by itself. <button @click=${() => link.retry()}>Try now</button>
    </p>`;
  }
  return [
    about?.accepts === false
      ? html`<p class="banner warn">The balancer is about to end and takes no new requests.</p>`
      : nothing,
    about?.supervisor_silent_for
      ? html`<p class="banner warn">
          The supervisor of the fleets has not answered for ${Math.round(about.supervisor_silent_for)} s.
        </p>`
      : nothing,
  ];
}

const noticeView = (notice) => html`
  <p class="notice ${notice.tone}">
    <span>${notice.text}</span>
    <button class="plain" aria-label="Dismiss: ${notice.text}" @click=${() => dismiss(notice.number)}>×</button>
  </p>
`;
