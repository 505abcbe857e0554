// Fields of a form from a JSON schema. Pure.

/** The schema that this one refers to, or itself, with what stands beside the reference. */
export function resolve(schema, whole) {
  if (schema.allOf?.length === 1) return resolve({ ...schema.allOf[0], ...omit(schema, 'allOf') }, whole);
  if (!schema.$ref) return schema;
  const target = schema.$ref
    .replace(/^#\//, '')
    .split('/')
    .reduce((at, key) => at[key], whole);
  return { ...resolve(target, whole), ...omit(schema, '$ref') };
}

const omit = (object, key) => Object.fromEntries(Object.entries(object).filter(([name]) => name !== key));

/** One field for each property of an object: `{ name, kind, choices, low, high, range, description }`. */
export const fields = (schema, whole) =>
  Object.entries(resolve(schema, whole).properties).map(([name, told]) => field(name, resolve(told, whole)));

function field(name, told) {
  const description = told.description ?? '';
  if (told.enum) return { name, kind: 'choice', choices: told.enum, range: '', description };
  if (told.type === 'boolean') return { name, kind: 'switch', range: '', description };
  const isWhole = told.type === 'integer';
  const low = told.minimum ?? told.exclusiveMinimum;
  const high = told.maximum ?? told.exclusiveMaximum;
  return { name, kind: isWhole ? 'whole' : 'number', ...limits(told, isWhole), range: range(told, low, high), description };
}

/** For the `min` and `max` of an input, which always take the bounds themselves. */
function limits({ minimum, maximum, exclusiveMinimum, exclusiveMaximum }, isWhole) {
  const step = isWhole ? 1 : 0;
  return {
    low: minimum ?? (exclusiveMinimum === undefined ? undefined : exclusiveMinimum + step),
    high: maximum ?? (exclusiveMaximum === undefined ? undefined : exclusiveMaximum - step),
  };
}

function range(told, low, high) {
  const from = low === undefined ? '' : `${told.minimum === undefined ? 'above' : 'from'} ${spoken(low)}`;
  const to = high === undefined ? '' : `${told.maximum === undefined ? 'below' : 'up to'} ${spoken(high)}`;
  return [from, to].filter(Boolean).join(', ');
}

/** Large powers of two, and what is one less, as people call them. */
export function spoken(value) {
  const power = Math.log2(Math.abs(value));
  if (power < 20) return value.toLocaleString('en');
  if (Number.isInteger(power)) return `${value < 0 ? '−' : ''}2^${power}`;
  return Number.isInteger(Math.log2(value + 1)) ? `2^${Math.log2(value + 1)} − 1` : value.toLocaleString('en');
}

/** The value of an input's text, or what is wrong with it. */
export function readField({ kind, low, high, range }, text) {
  if (kind !== 'whole' && kind !== 'number') return { value: text };
  const value = text.trim() === '' ? NaN : Number(text);
  if (!Number.isFinite(value)) return { problem: 'A number is expected' };
  if (kind === 'whole' && !Number.isInteger(value)) return { problem: 'A whole number is expected' };
  const isAbove = range.startsWith('above') && kind === 'number' && value === low;
  if (value < low || value > high || isAbove) return { problem: `Out of range: ${range}` };
  return { value };
}
