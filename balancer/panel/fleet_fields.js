// All keys of a fleet: as texts in a form, and as the balancer takes them. Pure.

import { changedReference, showReference } from './reference.js';
import { readField, spoken } from './schema.js';

const whole = (low, high) => ({ kind: 'whole', low, high, range: `from ${spoken(low)} to ${spoken(high)}` });
const number = (low, high) => ({ kind: 'number', low, high, range: `from ${spoken(low)} to ${spoken(high)}` });
const choice = (...choices) => ({ kind: 'choice', choices, range: '' });

const CACHE_TYPES = ['F32', 'F16', 'BF16', 'Q8_0', 'Q4_0', 'Q4_1', 'IQ4_NL', 'Q5_0', 'Q5_1'];
const LARGEST = 2 ** 31 - 1;

/** By group: the key where they stand in a fleet (null: in itself). `optional`: empty says nothing. */
export const GROUPS = [
  {
    title: 'Size',
    key: null,
    fields: [
      { name: 'slots', ...whole(1, 256), fallback: 4, about: 'Of each agent.' },
      { name: 'min', ...whole(0, 1024), fallback: 0, about: 'Agents that there always are.' },
      { name: 'max', ...whole(0, 1024), fallback: 1, about: 'Agents that there are at most.' },
      { name: 'idle_time', ...number(1, 86_400), fallback: 300, about: 'Seconds without work after which an agent goes.' },
      { name: 'grow_when_waiting', ...whole(1, 100_000), fallback: 1, about: 'So many requests that wait mean one more agent.' },
      { name: 'grow_at_slot_use', ...number(0.01, 1), fallback: 1, about: 'So large a part of the slots in use means one more.' },
      { name: 'spare_nodes', ...whole(0, 1024), fallback: 0, about: 'Room for so many more agents is asked for beforehand.' },
    ],
  },
  {
    title: 'Resources of each agent',
    key: 'resources',
    fields: [
      { name: 'cpus', ...number(0, 4096), fallback: 0, about: '' },
      { name: 'gpus', ...number(0, 64), fallback: 0, about: 'Above 1 only whole ones.' },
      { name: 'labels', kind: 'labels', range: '', fallback: {}, about: 'Of the node: pool=gpu, zone=a' },
    ],
  },
  {
    title: 'Engine (empty: as the desired state says)',
    key: 'engine',
    fields: [
      { name: 'context_size', ...whole(0, 2 ** 32 - 1), optional: true, about: 'Tokens.' },
      { name: 'n_batch', ...whole(1, LARGEST), optional: true, about: '' },
      { name: 'n_gpu_layers', ...whole(-LARGEST - 1, LARGEST), optional: true, about: '-1: all.' },
      { name: 'threads', ...whole(1, 1024), optional: true, about: '' },
      { name: 'tensor_split', kind: 'numbers', range: '', optional: true, about: 'The part of each GPU: 3, 1' },
      { name: 'main_gpu', ...whole(0, 255), optional: true, about: '' },
      { name: 'flash_attention', ...choice('', 'auto', 'on', 'off'), optional: true, about: '' },
      { name: 'k_cache_dtype', ...choice('', ...CACHE_TYPES), optional: true, about: '' },
      { name: 'v_cache_dtype', ...choice('', ...CACHE_TYPES), optional: true, about: '' },
      { name: 'kv_layout', ...choice('unified', 'separate'), fallback: 'unified', about: '' },
      { name: 'kv_cells', ...whole(16, LARGEST), optional: true, about: 'Tokens in the KV cache.' },
      { name: 'cache_tokens', ...whole(0, LARGEST), optional: true, about: 'Of finished prompts, at most.' },
      { name: 'longest_gap', ...number(0.01, 60), fallback: 0.15, about: 'Seconds that a stream may stand still for a prompt.' },
    ],
  },
];

const path = (group, field) => (group.key === null ? field.name : `${group.key}.${field.name}`);

/** The form's texts for this fleet; null: a new one. */
export function draftOf(fleet) {
  const draft = { model: fleet?.model ? showReference(fleet.model) : '' };
  for (const group of GROUPS) {
    const values = (group.key === null ? fleet : fleet?.[group.key]) ?? {};
    for (const field of group.fields) draft[path(group, field)] = shown(field, values[field.name] ?? field.fallback ?? null);
  }
  return draft;
}

function shown({ kind }, value) {
  if (value === null) return '';
  if (kind === 'labels') return Object.entries(value).map((pair) => pair.join('=')).join(', ');
  if (kind === 'numbers') return value.join(', ');
  return String(value);
}

/** What the texts stand for, and what is wrong by path. `before`: the fleet as it is; null: a new one. */
export function fleetOf(draft, before) {
  const problems = {};
  const fleet = {};
  const reference = changedReference(draft.model, before?.model ?? 'None');
  if (reference.problem) problems.model = reference.problem;
  else fleet.model = reference.model === 'None' ? null : reference.model;
  for (const group of GROUPS) {
    const values = {};
    for (const field of group.fields) {
      const { value, problem } = read(field, draft[path(group, field)]);
      if (problem) problems[path(group, field)] = problem;
      else values[field.name] = value;
    }
    if (group.key === null) Object.assign(fleet, values);
    else fleet[group.key] = values;
  }
  if (!problems.min && !problems.max && fleet.min > fleet.max) problems.min = 'This is more than max';
  return { fleet, problems };
}

/**
 * Only what was changed of the fleet `before`, as a change of what it is `now`: a group is replaced
 * whole, so the others of it are taken from there.
 */
export function changesOf(draft, before, now = before) {
  const { fleet } = fleetOf(draft, before);
  const shownBefore = draftOf(before);
  const isChanged = (path) => draft[path] !== shownBefore[path];
  const changes = isChanged('model') ? { model: fleet.model } : {};
  for (const group of GROUPS) {
    const values = group.key === null ? fleet : fleet[group.key];
    const changed = group.fields.filter((field) => isChanged(path(group, field))).map(({ name }) => [name, values[name]]);
    if (!changed.length) continue;
    if (group.key === null) Object.assign(changes, Object.fromEntries(changed));
    else changes[group.key] = { ...now[group.key], ...Object.fromEntries(changed) };
  }
  return changes;
}

function read(field, text) {
  const written = text.trim();
  if (field.optional && written === '') return { value: null };
  const parts = written.split(',').map((part) => part.trim()).filter(Boolean);
  if (field.kind === 'numbers') {
    const values = parts.map(Number);
    return values.every(Number.isFinite) ? { value: values } : { problem: 'Numbers with commas between them are expected' };
  }
  if (field.kind === 'labels') {
    const pairs = parts.map((part) => part.split('='));
    const isFine = pairs.every((pair) => pair.length === 2 && pair[0].trim());
    if (!isFine) return { problem: 'NAME=VALUE with commas between them is expected' };
    return { value: Object.fromEntries(pairs.map(([name, value]) => [name.trim(), value.trim()])) };
  }
  return readField(field, written);
}
