//! The two identities every result carries.

use crate::settings::Settings;
use device::DeviceInfo;
use engine::Protection;
use model::Model;
use numerics::Profile;
use numerics::digest::{Digest, Encoder};
use numerics::sample::SamplingParams;
use receipt::{EnvironmentId, NumericsId};

/// Version and hash of the sources, dependencies and compiler options.
pub const BUILD: &str = concat!(env!("CARGO_PKG_VERSION"), "+", env!("BLOCKLOCK_BUILD"));

/// Numerics version, profile, configuration and weights: what an `invariant` request's bits are a function of.
pub fn numerics_id(model: &Model, profile: Profile) -> NumericsId {
    let mut config = Encoder::new("blocklock config v1");
    model.config.encode_canonical(&mut config);
    receipt::current_numerics_id(profile, &config.finish().0, &model.weights_hash())
}

/// Build, device and limits: what the bits of every other protection depend on too.
pub fn environment_id(device: &DeviceInfo, settings: &Settings) -> EnvironmentId {
    let limits = [
        ("build", BUILD.to_string()),
        ("device", device.name.clone()),
        ("token_budget", settings.token_budget.value.to_string()),
        ("max_running", settings.max_running.value.to_string()),
        (
            "prefill_chunk",
            format!("{:?}", settings.prefill_chunk.value),
        ),
        ("prefix_cache", settings.prefix_cache.value.to_string()),
        ("locked", format!("{:?}", settings.locked())),
    ];
    let limits = limits.iter().map(|(k, v)| (*k, v.as_str()));
    receipt::environment_id(
        limits.chain(device.facts.iter().map(|(k, v)| (k.as_str(), v.as_str()))),
    )
}

/// Equal keys mean equal tokens and Top-20 bits. `invariant` promises that of the numerics alone, the locked protections
/// of the environment and the geometry too (`locked`); `none` never, and has no key. Stop conditions are left out: they end an answer sooner or later and change none of its steps.
pub fn reproducibility_key(
    numerics: &str,
    protection: Protection,
    locked: Option<(&str, &str)>,
    prompt: &[u32],
    sampling: &SamplingParams,
) -> Option<Digest> {
    if protection == Protection::None {
        return None;
    }
    let s = sampling;
    let mut key = Encoder::new("blocklock reproducibility-key v1");
    key.text("numerics", numerics);
    if let Some((environment, geometry)) = locked {
        key.text("environment", environment)
            .text("protection", protection.name())
            .text("geometry", geometry);
    }
    key.u32s("prompt", prompt.iter().copied())
        .f32("temperature", s.temperature)
        .u32("top_k", s.top_k)
        .f32("top_p", s.top_p)
        .f32("min_p", s.min_p)
        .u64("seed", s.seed)
        .u32("choice", s.choice)
        .f32("repetition_penalty", s.repetition_penalty)
        .f32("presence_penalty", s.presence_penalty)
        .f32("frequency_penalty", s.frequency_penalty)
        .u32s("bias ids", s.logit_bias.iter().map(|b| b.0))
        .u32s("bias values", s.logit_bias.iter().map(|b| b.1.to_bits()));
    Some(key.finish())
}
