// Keys of the operator, by role, for as long as this tab is open.

import { link, question } from './store.js';

const item = (role) => `headrace.${role}`;

export const keyOf = (role) => sessionStorage.getItem(item(role));

const asked = {};

/** Asks for a key of this role; null if none is given. All who ask at once share the answer. */
export function wantKey(role, why) {
  asked[role] ??= question({ kind: 'key', role, why }).finally(() => delete asked[role]);
  return asked[role];
}

/** In place of the one before: for a key that the balancer has taken. */
export function keep(role, key) {
  sessionStorage.setItem(item(role), key);
  link.resume();
}

/** Subprotocols for a websocket, which cannot carry headers. */
export function protocols(role) {
  const key = keyOf(role);
  if (!key) return ['headrace'];
  const bytes = String.fromCharCode(...new TextEncoder().encode(key));
  const text = btoa(bytes).replaceAll('+', '-').replaceAll('/', '_').replaceAll('=', '');
  return ['headrace', `headrace.key.${text}`];
}
