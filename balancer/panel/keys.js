// Keys of the operator, by role, for as long as this tab is open.

import { question, reconnect } from './store.js';

const item = (role) => `headrace.${role}`;

export const keyOf = (role) => sessionStorage.getItem(item(role));

const asked = {};

/** Asks for a key of this role; returns whether one was given. All who ask at once share the answer. */
export function wantKey(role, why) {
  asked[role] ??= question({ kind: 'key', role, why })
    .then((key) => {
      if (key) sessionStorage.setItem(item(role), key);
      if (key) reconnect();
      return Boolean(key);
    })
    .finally(() => delete asked[role]);
  return asked[role];
}

/** Subprotocols for a websocket, which cannot carry headers. */
export function protocols(role) {
  const key = keyOf(role);
  if (!key) return ['headrace'];
  const bytes = String.fromCharCode(...new TextEncoder().encode(key));
  const text = btoa(bytes).replaceAll('+', '-').replaceAll('/', '_').replaceAll('=', '');
  return ['headrace', `headrace.key.${text}`];
}
