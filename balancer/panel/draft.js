// The draft of a desired state: what is typed on the model page, and the wish that it stands for.

import { changedReference, showReference } from './reference.js';
import { readField } from './schema.js';
import { update } from './store.js';

export const draftOf = (stored) => ({
  model: showReference(stored.model),
  projector: showReference(stored.multimodal_projection),
  usesTemplate: stored.use_chat_template_override,
  template: stored.chat_template_override?.content ?? '',
  parameters: { ...stored.inference_parameters },
});

/** Changes a part of the draft. */
export const edit = (change) =>
  update(({ model }) => {
    model.draft = { ...model.draft, ...change };
    model.isEdited = true;
  });

/** The desired state that the draft stands for, and what is wrong with it by field. */
export function wishOf({ draft, stored, form }) {
  const model = changedReference(draft.model, stored.model);
  const projector = changedReference(draft.projector, stored.multimodal_projection);
  const parameters = readParameters(form.fields, draft.parameters);
  const problems = { ...parameters.problems };
  if (model.problem) problems.model = model.problem;
  if (projector.problem) problems.projector = projector.problem;
  const wish = {
    model: model.model,
    multimodal_projection: projector.model,
    use_chat_template_override: draft.usesTemplate,
    chat_template_override: draft.template ? { content: draft.template } : null,
    inference_parameters: parameters.values,
  };
  return { wish, problems };
}

/** What the typed texts stand for, and what is wrong with them by name. */
function readParameters(fields, draft) {
  const values = {};
  const problems = {};
  for (const field of fields) {
    const typed = draft[field.name];
    const { value, problem } = typeof typed === 'string' ? readField(field, typed) : { value: typed };
    if (problem) problems[field.name] = problem;
    else values[field.name] = value;
  }
  return { values, problems };
}
