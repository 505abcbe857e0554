// The dashboard: what the agents do now, how it was in the last minutes, and what went wrong lately.

import { agentCard, inOrder } from './agents.js';
import { chart, series } from './charts.js';
import { bytes, clock, count, NONE, plural, seconds, short } from './format.js';
import { html, nothing, repeat } from './lit.js';

export const title = 'Dashboard';

export function view(state) {
  const agents = inOrder(state.data.agents);
  const lines = series(state.data.history);
  return html`
    ${tiles(state, agents, lines)}
    <section aria-labelledby="charts-title">
      <h2 id="charts-title">The last minutes</h2>
      <div class="charts">
        ${chart('tokens', 'Tokens generated a second', lastOf(lines.rate, short))}
        ${chart('requests', 'Requests', requestsNow(lines))}
        ${chart('first-token', 'Time to first token', lastOf(lines.firstToken, seconds))}
      </div>
    </section>
    <section aria-labelledby="agents-title">
      <h2 id="agents-title">Agents</h2>
      ${agents.length
        ? html`<div class="cards">
            ${repeat(agents, (agent) => agent.id, (agent) => agentCard(agent, state.downloads[agent.id], state.busy))}
          </div>`
        : html`<p class="empty">No agent is connected.</p>`}
    </section>
    <section aria-labelledby="errors-title">
      <h2 id="errors-title">Recent errors</h2>
      ${errors(state)}
    </section>
  `;
}

const lastOf = (values, format) => format(values.findLast((value) => value !== null) ?? null);

/** In the colours of the chart's lines. */
const requestsNow = ({ running, waiting }) => html`
  <span class="line-1">${count(running.at(-1))} running</span>,
  <span class="line-2">${count(waiting.at(-1))} waiting</span>
`;

function tiles(state, agents, lines) {
  const { buffer, about } = state.data.balancer;
  const ready = agents.filter((agent) => agent.state === 'ready' || agent.state === 'waits_for_turn').length;
  const sum = (key) => agents.reduce((total, agent) => total + agent[key], 0);
  const tile = (name, value, more) => html`<div class="tile">
    <dt>${name}</dt>
    <dd>${value}${more ? html` <span class="more">${more}</span>` : nothing}</dd>
  </div>`;
  return html`<dl class="tiles">
    ${tile('Agents ready', `${ready} of ${agents.length}`)}
    ${tile('Slots in use', `${sum('slots_busy')} of ${sum('slots')}`)}
    ${tile('Buffer', buffer ? `${count(buffer.waiting)} of ${count(buffer.capacity)}` : NONE, buffer?.bytes ? bytes(buffer.bytes) : '')}
    ${tile('Tokens/s', short(lines.rate.at(-1) ?? null))}
    ${tile('Up for', about ? seconds(Math.max(0, Date.now() / 1000 + state.skew - about.started)) : NONE, about ? `version ${about.version}` : '')}
  </dl>`;
}

function errors(state) {
  const rows = Object.entries(state.data.errors).sort(([a], [b]) => Number(b) - Number(a));
  if (!rows.length) return html`<p class="empty">None.</p>`;
  return html`<ul class="errors">
    ${repeat(
      rows,
      ([number]) => number,
      ([, error]) => html`<li>
        <time>${clock(error.at)}</time>
        <strong>${error.code}</strong>
        ${error.count > 1 ? html`<span class="tag">${plural(error.count, 'time')}</span>` : nothing}
        <span class="text">${error.message}</span>
        ${error.agent ? html`<span class="quiet">${error.agent}</span>` : nothing}
        ${error.request_id
          ? html`<a href="#requests/${encodeURIComponent(error.request_id)}">request ${error.request_id}</a>`
          : nothing}
      </li>`,
    )}
  </ul>`;
}
