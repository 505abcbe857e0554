// A conversation with a model: what is sent of it, and what the answer's messages make of it. Pure.

const PARTS = {
  ContentToken: 'text',
  ReasoningToken: 'thoughts',
  ToolCallToken: 'calls',
  UndeterminableToken: 'text',
};

export const newAnswer = (id, sent) => ({
  id,
  role: 'assistant',
  state: 'waiting',
  text: '',
  thoughts: '',
  calls: '',
  agent: null,
  problem: null,
  usage: null,
  sent,
  first: null,
  last: null,
});

export const isOpen = (answer) => answer.state === 'waiting' || answer.state === 'writing';

/** The answer after this message of the inference socket; `now`: in seconds. */
export function hear(answer, message, now) {
  if (message.Error) return fail(answer, message.Error.error.description, now);
  const told = message.Response.response.GeneratedToken;
  if (told === undefined) return fail(answer, spoken(message.Response.response), now);
  const [[kind, value]] = typeof told === 'string' ? [[told, '']] : Object.entries(told);
  const heard = { ...answer, agent: message.Response.generated_by ?? answer.agent };
  if (kind === 'Done') {
    return { ...heard, state: answer.state === 'stopped' ? 'stopped' : 'done', usage: value.usage };
  }
  if (kind in PARTS) {
    // What was on its way when it was stopped.
    if (!isOpen(answer)) return answer;
    const part = PARTS[kind];
    return { ...heard, state: 'writing', [part]: answer[part] + value, first: answer.first ?? now, last: now };
  }
  // The text of the call stands there already; these say what was made of it.
  if (kind === 'ToolCallParsed') return heard;
  return fail(heard, spoken(value) || kind, now);
}

export const fail = (answer, problem, now) =>
  isOpen(answer) ? { ...answer, state: 'failed', problem, last: now } : answer;

export const stop = (answer, now) => (isOpen(answer) ? { ...answer, state: 'stopped', last: now } : answer);

const spoken = (value) => (typeof value === 'string' ? value : JSON.stringify(value));

/** The request for the next answer. */
export function request(id, messages, options) {
  const params = {
    add_generation_prompt: true,
    conversation_history: history(messages, options.system),
    enable_thinking: options.thinks,
    max_tokens: options.maxTokens,
    tools: [],
  };
  if (options.model) params.model = options.model;
  if (options.temperature !== null) params.sampling = { temperature: options.temperature };
  return { Request: { id, request: { ContinueFromConversationHistory: params } } };
}

/** Bytes of a message to the balancer: so much less than it takes by default that it never hangs up. */
export const MOST_BYTES = 6_000_000;

/** Bytes of a request as it is sent: each has all the images that were sent before. */
export const size = (message) => new TextEncoder().encode(JSON.stringify(message)).length;

/** Thoughts are not told again, nor answers that came to nothing with what was asked: roles take turns. */
function history(messages, system) {
  const isAnswer = (message) => message?.role === 'assistant';
  const isNothing = (message) => isAnswer(message) && !message.text;
  const said = messages.filter((message, n) => !isNothing(isAnswer(message) ? message : messages[n + 1]));
  const told = said.map((message) => ({ role: message.role, content: content(message) }));
  return system.trim() ? [{ role: 'system', content: system }, ...told] : told;
}

function content({ text, images = [] }) {
  if (!images.length) return text;
  const parts = images.map((url) => ({ type: 'image_url', image_url: { url } }));
  return text ? [...parts, { type: 'text', text }] : parts;
}

/** Seconds to the first token, and tokens a second after it; each null if it is not known. */
export function timings({ sent, first, last, usage }) {
  const tokens = usage ? usage.content_tokens + usage.reasoning_tokens + usage.tool_call_tokens + usage.undeterminable_tokens : null;
  const time = first === null ? 0 : last - first;
  return {
    firstToken: first === null ? null : first - sent,
    tokens,
    rate: tokens !== null && tokens > 1 && time > 0 ? (tokens - 1) / time : null,
  };
}
