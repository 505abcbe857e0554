// Questions to the balancer. Every address is relative to where the panel was found, so that it works
// behind a proxy's path.

import { keep, keyOf, wantKey } from './keys.js';

const root = new URL('../', import.meta.url);

export const address = (path) => new URL(path, root);

/** Why the balancer did not do it, in its own words. */
export class Refused extends Error {
  /** `status`: that of HTTP; 0: it was not reached. `wantsKey`: another key would help. */
  constructor(status, text, wantsKey = false) {
    super(text);
    this.status = status;
    this.wantsKey = wantsKey;
  }
}

/** Returns the response; raises `Refused`. Asks the operator for a key if one is wanted. */
export async function ask(method, path, { body, headers, role = 'management', signal } = {}) {
  /** Was typed, and is not yet known to be good. */
  let typed = null;
  for (;;) {
    const key = typed ?? keyOf(role);
    const response = await send(method, path, { body, headers, key, signal });
    const text = response.ok ? '' : (await response.text().catch(() => '')).trim();
    const code = response.headers.get('x-headrace-error') ?? errorOf(text)?.code;
    const isWanted = response.status === 401 || (response.status === 403 && code === 'forbidden');
    if (typed !== null && !isWanted) keep(role, typed);
    if (response.ok) return response;
    if (isWanted) {
      // Another question may have brought a key while this one was on its way.
      const isOld = typed === null && keyOf(role) !== key;
      typed = isOld ? null : await wantKey(role, errorText(text));
      if (isOld || typed !== null) continue;
    }
    throw new Refused(response.status, reason(code, text) || `the balancer answers ${response.status}`, isWanted);
  }
}

export const askJson = async (...question) => (await ask(...question)).json();

/** Of a page that was opened by a name: a balancer trusts only addresses by itself. */
const reason = (code, text) =>
  code === 'origin_not_allowed'
    ? `The balancer does nothing for a page at ${location.origin} unless it was started with --allow-origin ${location.origin}`
    : errorText(text);

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

const errorText = (text) => errorOf(text)?.message ?? text;

/** OpenAI's routes answer with an object, and say the code there only. */
function errorOf(text) {
  try {
    return JSON.parse(text).error;
  } catch {
    return undefined;
  }
}
