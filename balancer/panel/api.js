// Questions to the balancer. Every address is relative to where the panel was found, so that it works
// behind a proxy's path.

import { keyOf, wantKey } from './keys.js';

const root = new URL('../', import.meta.url);

export const address = (path) => new URL(path, root);

/** Why the balancer did not do it, in its own words. */
export class Refused extends Error {
  /** `status`: that of HTTP; 0: it was not reached. */
  constructor(status, text) {
    super(text);
    this.status = status;
  }
}

/** Returns the response; raises `Refused`. Asks the operator for a key if one is wanted. */
export async function ask(method, path, { body, headers, role = 'management', signal } = {}) {
  for (;;) {
    const key = keyOf(role);
    const response = await send(method, path, { body, headers, key, signal });
    if (response.ok) return response;
    const text = (await response.text().catch(() => '')).trim();
    if (wantsKey(response.status, key)) {
      // Another question may have brought a key while this one was on its way.
      if (keyOf(role) !== key || (await wantKey(role, text))) continue;
    }
    throw new Refused(response.status, errorText(text) || `the balancer answers ${response.status}`);
  }
}

export const askJson = async (...question) => (await ask(...question)).json();

/** Without a key, 403 is about the page's origin, and no key would help. */
const wantsKey = (status, key) => status === 401 || (status === 403 && key !== null);

async function send(method, path, { body, headers, key, signal }) {
  const all = { ...headers };
  if (key) all.authorization = `Bearer ${key}`;
  if (body !== undefined) all['content-type'] = 'application/json';
  try {
    return await fetch(address(path), {
      method,
      headers: all,
      body: body === undefined ? undefined : JSON.stringify(body),
      cache: 'no-store',
      signal,
    });
  } catch (error) {
    throw new Refused(0, signal?.aborted ? 'stopped' : 'the balancer cannot be reached');
  }
}

/** OpenAI's routes answer with an object. */
function errorText(text) {
  try {
    return JSON.parse(text).error.message ?? text;
  } catch {
    return text;
  }
}
