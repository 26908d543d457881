//! Sampling options, from flags or from a batch record, to the engine's parameters.

use crate::args::SamplingArgs;
use crate::values;
use anyhow::{Result, bail};
use numerics::sample::SamplingParams;
use serde::Deserialize;
use std::collections::BTreeMap;

impl SamplingArgs {
    /// The parameters these flags mean. Their ranges were checked when they were parsed.
    pub fn params(&self) -> Result<SamplingParams> {
        let d = SamplingParams::default();
        let mut logit_bias = self.logit_bias.clone();
        logit_bias.sort_by_key(|(id, _)| *id);
        if let Some(twice) = logit_bias.windows(2).find(|w| w[0].0 == w[1].0) {
            bail!(
                "--logit-bias: id {} is given twice; once is allowed",
                twice[0].0
            );
        }
        Ok(SamplingParams {
            temperature: self.temperature.unwrap_or(d.temperature),
            top_k: self.top_k.unwrap_or(d.top_k),
            top_p: self.top_p.unwrap_or(d.top_p),
            min_p: self.min_p.unwrap_or(d.min_p),
            seed: self.seed.unwrap_or(d.seed),
            choice: 0,
            repetition_penalty: self.repetition_penalty.unwrap_or(d.repetition_penalty),
            presence_penalty: self.presence_penalty.unwrap_or(d.presence_penalty),
            frequency_penalty: self.frequency_penalty.unwrap_or(d.frequency_penalty),
            logit_bias,
        })
    }
}

/// The same options in a batch record; what is absent stays as the flags have it.
#[derive(Debug, Default, Deserialize)]
pub struct SamplingRecord {
    temperature: Option<f64>,
    top_k: Option<u32>,
    top_p: Option<f64>,
    min_p: Option<f64>,
    seed: Option<u64>,
    repetition_penalty: Option<f64>,
    presence_penalty: Option<f64>,
    frequency_penalty: Option<f64>,
    logit_bias: Option<BTreeMap<String, f64>>,
}

impl SamplingRecord {
    /// These options over `defaults`, under the same limits as the flags.
    pub fn over(self, defaults: &SamplingParams) -> Result<SamplingParams> {
        type Parse = fn(&str) -> Result<f32, String>;
        let number = |name: &str, given: Option<f64>, default: f32, parse: Parse| match given {
            None => Ok(default),
            Some(x) => {
                parse(&x.to_string()).map_err(|allowed| anyhow::anyhow!("{name} is {x}: {allowed}"))
            }
        };
        let d = defaults;
        let mut logit_bias = d.logit_bias.clone();
        if let Some(map) = self.logit_bias {
            logit_bias.clear();
            for (id, bias) in map {
                let pair = values::bias(&format!("{id}:{bias}"))
                    .map_err(|allowed| anyhow::anyhow!("logit_bias of '{id}': {allowed}"))?;
                logit_bias.push(pair);
            }
            logit_bias.sort_by_key(|(id, _)| *id);
            logit_bias.dedup_by_key(|(id, _)| *id);
        }
        Ok(SamplingParams {
            temperature: number(
                "temperature",
                self.temperature,
                d.temperature,
                values::temperature,
            )?,
            top_k: self.top_k.unwrap_or(d.top_k),
            top_p: number("top_p", self.top_p, d.top_p, values::top_p)?,
            min_p: number("min_p", self.min_p, d.min_p, values::fraction)?,
            seed: self.seed.unwrap_or(d.seed),
            choice: d.choice,
            repetition_penalty: number(
                "repetition_penalty",
                self.repetition_penalty,
                d.repetition_penalty,
                values::repetition,
            )?,
            presence_penalty: number(
                "presence_penalty",
                self.presence_penalty,
                d.presence_penalty,
                values::penalty,
            )?,
            frequency_penalty: number(
                "frequency_penalty",
                self.frequency_penalty,
                d.frequency_penalty,
                values::penalty,
            )?,
            logit_bias,
        })
    }
}

/// Sampling parameters as every JSON output shows them.
pub fn to_json(p: &SamplingParams) -> serde_json::Value {
    serde_json::json!({
        "temperature": p.temperature,
        "top_k": p.top_k,
        "top_p": p.top_p,
        "min_p": p.min_p,
        "seed": p.seed,
        "repetition_penalty": p.repetition_penalty,
        "presence_penalty": p.presence_penalty,
        "frequency_penalty": p.frequency_penalty,
        "logit_bias": p.logit_bias,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_overrides_flags_within_their_limits() {
        let flags = SamplingParams {
            temperature: 0.5,
            seed: 3,
            ..SamplingParams::default()
        };
        let record: SamplingRecord =
            serde_json::from_str(r#"{"top_p": 0.9, "seed": 4, "logit_bias": {"7": -1, "3": 2}}"#)
                .unwrap();
        let p = record.over(&flags).unwrap();
        assert_eq!((p.temperature, p.top_p, p.seed), (0.5, 0.9, 4));
        assert_eq!(p.logit_bias, [(3, 2.0), (7, -1.0)]);
        let bad: SamplingRecord = serde_json::from_str(r#"{"temperature": -1}"#).unwrap();
        let message = bad.over(&flags).unwrap_err().to_string();
        assert!(
            message.contains("temperature is -1") && message.contains("allowed"),
            "{message}"
        );
    }
}
