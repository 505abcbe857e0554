// Model references: as an operator writes them in one line, and as the desired state has them. Pure.

const HUGGING_FACE =
  /^https:\/\/huggingface\.co\/([^/?#]+\/[^/?#]+)\/(?:blob|resolve)\/([^/?#]+)\/([^?#]+)(?:\?download=true)?$/;

/** Returns `{ model }` or, if nobody could mean this, `{ problem }`. */
export function parseReference(text) {
  const written = text.trim();
  if (!written) return { model: 'None' };
  const scheme = /^([a-z][a-z0-9+.-]*):\/\//i.exec(written)?.[1].toLowerCase();
  if (scheme === undefined) {
    if (written.startsWith('/')) return { model: { LocalToAgent: written } };
    return { problem: 'A path on the agents begins with a slash; an address with https://' };
  }
  if (scheme === 'agent') {
    const path = written.slice('agent://'.length);
    if (path.startsWith('/') && path.length > 1) return { model: { LocalToAgent: path } };
    return { problem: 'The path behind agent:// begins with a slash: agent:///models/a.gguf' };
  }
  if (scheme !== 'http' && scheme !== 'https') return { problem: `${scheme}:// is no address of a model` };
  const found = HUGGING_FACE.exec(written);
  if (found) {
    const [, repo_id, revision, filename] = found;
    return { model: { HuggingFace: { filename, repo_id, revision } } };
  }
  if (!URL.canParse(written)) return { problem: 'This is no complete address' };
  return { model: { Url: { url: written } } };
}

/** In the form that `parseReference` reads. */
export function showReference(model) {
  if (!model || model === 'None') return '';
  if (model.LocalToAgent !== undefined) return `agent://${model.LocalToAgent}`;
  if (model.Url) return model.Url.url;
  const { repo_id, revision, filename } = model.HuggingFace;
  return `https://huggingface.co/${repo_id}/resolve/${revision}/${filename}`;
}

/** What was there before if its text is untouched: it may say more, such as a checksum. */
export function changedReference(text, before) {
  return text.trim() === showReference(before) ? { model: before ?? 'None' } : parseReference(text);
}
