// Numbers and times as people read them. Pure.

const whole = new Intl.NumberFormat('en', { maximumFractionDigits: 0 });
const tenth = new Intl.NumberFormat('en', { minimumFractionDigits: 1, maximumFractionDigits: 1 });

/** What stands where there is nothing to say. */
export const NONE = '–';

const isNumber = (value) => typeof value === 'number' && Number.isFinite(value);

export const count = (value) => (isNumber(value) ? whole.format(value) : NONE);

export const plural = (value, noun) => `${count(value)} ${noun}${value === 1 ? '' : 's'}`;

/** Short: one digit behind the point if the number is small. */
export function short(value) {
  if (!isNumber(value)) return NONE;
  return Math.abs(value) < 100 ? tenth.format(value) : whole.format(value);
}

export const percent = (part, all) => (all > 0 ? `${Math.round((100 * part) / all)} %` : NONE);

export function seconds(value) {
  if (!isNumber(value)) return NONE;
  const time = Math.max(0, value);
  if (time < 0.9995) return `${Math.round(time * 1000)} ms`;
  if (time < 9.95) return `${time.toFixed(2)} s`;
  if (time < 59.5) return `${time.toFixed(1)} s`;
  const total = Math.round(time);
  if (total < 3600) return `${Math.floor(total / 60)} min ${total % 60} s`;
  if (total < 86_400) return `${Math.floor(total / 3600)} h ${Math.floor((total % 3600) / 60)} min`;
  return `${Math.floor(total / 86_400)} d ${Math.floor((total % 86_400) / 3600)} h`;
}

export function bytes(value) {
  if (!isNumber(value)) return NONE;
  const units = ['B', 'kB', 'MB', 'GB', 'TB'];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${unit === 0 ? whole.format(value) : short(value)} ${units[unit]}`;
}

/** Of unix seconds. */
export const clock = (at) => new Date(at * 1000).toLocaleTimeString('en-GB');

/** Such as "max tokens" for `max_tokens`. */
export const words = (name) => name.replaceAll('_', ' ').toLowerCase();

/** The last part of a path or an address. */
export const fileName = (path) => path.split(/[/\\]/).filter(Boolean).at(-1) ?? path;
