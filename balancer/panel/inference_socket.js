// The websocket of the native protocol: opened when it is needed, and then kept.

import { address, askJson } from './api.js';
import { protocols } from './keys.js';

const TOO_LARGE = 1009;

/** A browser does not say why. */
const NOT_OPENED = `the balancer did not open the websocket; for a page at ${location.origin} it may have to be started with --allow-origin ${location.origin}`;

let opening = null;
/** What gets the messages of each request, by its id. */
const open = new Map();
/** The ids of those that wait for the websocket to be open. */
const unsent = new Set();

/** Sends a request. `hear(message)` gets what comes of it, `lost(why)` is told if nothing more will. */
export async function send(id, request, { hear, lost }) {
  unsent.add(id);
  try {
    const socket = await connected();
    if (!unsent.has(id)) return; // it was stopped meanwhile
    open.set(id, { hear, lost });
    socket.send(JSON.stringify(request));
  } finally {
    unsent.delete(id);
  }
}

/** Says that nobody waits for more of it. One that has not been sent yet will not be. */
export async function stopResponding(id) {
  if (unsent.delete(id) || !open.has(id)) return;
  const socket = await opening;
  socket?.send(JSON.stringify({ Notification: { StopRespondingTo: id } }));
}

export const forget = (id) => open.delete(id);

async function connected() {
  if (opening === null) {
    opening = connect();
    opening.catch(() => (opening = null));
  }
  return opening;
}

async function connect() {
  // A browser does not say why a websocket was refused: this asks for a key if one is wanted.
  await askJson('GET', 'v1/models', { role: 'inference' });
  const url = address('api/v1/inference_socket');
  url.protocol = url.protocol.replace('http', 'ws');
  const socket = new WebSocket(url, protocols('inference'));
  socket.addEventListener('message', ({ data }) => receive(JSON.parse(data)));
  await new Promise((resolve, reject) => {
    socket.addEventListener('open', resolve);
    socket.addEventListener('close', () => reject(new Error(NOT_OPENED)));
  });
  socket.addEventListener('close', closed);
  return socket;
}

function receive(message) {
  const told = message.Response ?? message.Error;
  if (told) open.get(told.request_id)?.hear(message);
}

function closed({ code, reason }) {
  opening = null;
  const why = code === TOO_LARGE ? 'the message is larger than the balancer takes' : reason || 'the connection was lost';
  for (const { lost } of open.values()) lost(why);
  open.clear();
}
