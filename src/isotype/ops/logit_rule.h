// What a loss does to a logit before its softmax, and the slope of that. A Rule has `scale` and `softcap`; CAPPED: there is a softcap.
#pragma once

#include "lanes.h"

namespace isotype {

template <bool CAPPED, class Rule>
inline f32 rule_logits(f32 x, const Rule& rule) {
  const f32 z = x * rule.scale;
  return CAPPED ? rule.softcap * tanh(z / rule.softcap) : z;
}

// d z / d x of the above
template <bool CAPPED, class Rule>
inline f32 slope(f32 x, const Rule& rule) {
  if (!CAPPED) return all(rule.scale);
  const f32 t = tanh(x * (rule.scale / rule.softcap));
  return rule.scale * (1.0f - t * t);
}

}  // namespace isotype
