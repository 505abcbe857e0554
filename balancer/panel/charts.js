// Charts of the last minutes, by uPlot. A view says where one stands; `drawCharts` fills it.

import { html } from './lit.js';
import uPlot from './vendor/uplot-1.6.32/uPlot.esm.js';

const HEIGHT = 150;

/** The lines of all charts, from what the balancer noted every other second. Pure. */
export function series(history) {
  const notes = Object.entries(history)
    .sort(([a], [b]) => Number(a) - Number(b))
    .map(([, note]) => note);
  return {
    at: notes.map((note) => note.at),
    rate: notes.map((note, n) => (n === 0 ? null : rate(notes[n - 1], note))),
    running: notes.map((note) => note.running),
    waiting: notes.map((note) => note.buffered),
    firstToken: notes.map((note) => note.first_token),
  };
}

/** Null where the balancer has begun to count anew. */
function rate(before, note) {
  const tokens = note.tokens - before.tokens;
  const time = note.at - before.at;
  return tokens >= 0 && time > 0 ? tokens / time : null;
}

const KINDS = {
  tokens: { lines: [['Tokens/s', 'rate', '--line-1']] },
  requests: {
    lines: [
      ['Running', 'running', '--line-1'],
      ['Waiting', 'waiting', '--line-2'],
    ],
  },
  // Points: many intervals have none, and between them nothing is known.
  'first-token': { lines: [['Seconds', 'firstToken', '--line-1']], hasPoints: true },
};

export const chart = (kind, title, now) => html`<figure class="chart">
  <figcaption>${title} <span class="now">${now}</span></figcaption>
  <div data-chart=${kind} role="img" aria-label="${title} in the last minutes"></div>
</figure>`;

/** By the element that they stand in. */
const drawn = new WeakMap();

const isDark = matchMedia('(prefers-color-scheme: dark)');

export function drawCharts(root, state) {
  const elements = root.querySelectorAll('[data-chart]');
  if (!elements.length) return;
  const lines = series(state.data.history);
  for (const element of elements) drawChart(element, lines);
}

function drawChart(element, lines) {
  const { lines: kinds } = KINDS[element.dataset.chart];
  const data = [lines.at, ...kinds.map(([, key]) => lines[key])];
  const width = element.clientWidth;
  if (!width) return;
  let known = drawn.get(element);
  if (known && known.isDark !== isDark.matches) {
    known.plot.destroy();
    known = undefined;
  }
  if (!known) {
    const plot = new uPlot(options(element.dataset.chart, element, width), data, element);
    drawn.set(element, { plot, isDark: isDark.matches, width, newest: lines.at.at(-1) });
    return;
  }
  if (known.width !== width) known.plot.setSize({ width, height: HEIGHT });
  if (known.newest !== lines.at.at(-1)) known.plot.setData(data);
  known.width = width;
  known.newest = lines.at.at(-1);
}

/** With as many digits as it takes to tell them apart. Pure. */
export function labels(ticks) {
  const step = Math.min(...ticks.slice(1).map((tick, n) => tick - ticks[n]));
  const digits = step > 0 && step < 1 ? Math.min(4, Math.ceil(-Math.log10(step) - 1e-9)) : 0;
  return ticks.map((tick) => tick.toFixed(digits));
}

function options(kind, element, width) {
  const { lines, hasPoints } = KINDS[kind];
  const styles = getComputedStyle(element);
  const color = (name) => styles.getPropertyValue(name).trim();
  const axis = {
    stroke: color('--quiet'),
    font: '11px system-ui, sans-serif',
    grid: { stroke: color('--grid'), width: 1 },
    ticks: { show: false },
  };
  return {
    width,
    height: HEIGHT,
    legend: { show: false },
    cursor: { show: false },
    scales: { y: { range: (_plot, _low, high) => [0, high > 0 ? high * 1.1 : 1] } },
    axes: [
      { ...axis, size: 26, space: 56, incrs: [60, 120, 300, 600], values: '{HH}:{mm}' },
      { ...axis, size: 44, values: (_plot, ticks) => labels(ticks) },
    ],
    series: [
      {},
      ...lines.map(([label, , name]) => ({
        label,
        stroke: color(name),
        width: 1.5,
        points: { show: Boolean(hasPoints), size: 5, fill: color(name) },
        ...(hasPoints ? { paths: () => null } : {}),
      })),
    ],
  };
}
