// How fast downloads are, from what the status stream told lately. Pure.

const SPAN = 15;
/** Seconds that are looked back. */

/** What is remembered for each agent, after these agents were told. */
export function observe(before, agents, at) {
  const next = {};
  for (const [id, { download }] of Object.entries(agents)) {
    if (!download) continue;
    const known = before[id]?.filename === download.filename ? before[id].samples : [];
    const last = known.at(-1);
    const samples = last?.current === download.current ? known : [...known, { at, current: download.current }];
    next[id] = {
      filename: download.filename,
      samples: samples.filter((sample, n) => n >= samples.length - 2 || at - sample.at <= SPAN),
    };
  }
  return next;
}

/** Bytes a second until now and seconds that are left; each null as long as it is not known. */
export function pace(seen, download, at) {
  const first = seen?.samples[0];
  const last = seen?.samples.at(-1);
  if (!first || last.at <= first.at || last.current < first.current) return { rate: null, left: null };
  const rate = (last.current - first.current) / (Math.max(at, last.at) - first.at);
  const isKnown = download.total !== null && rate > 0;
  return { rate, left: isKnown ? (download.total - download.current) / rate : null };
}
