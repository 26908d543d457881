//! The two identities every result carries.

use crate::settings::Settings;
use device::DeviceInfo;
use model::Model;
use numerics::Profile;
use numerics::digest::Encoder;
use receipt::{EnvironmentId, NumericsId};

/// Numerics version, profile, configuration and weights: what an `invariant` request's bits are a function of.
pub fn numerics_id(model: &Model, profile: Profile) -> NumericsId {
    let mut config = Encoder::new("blocklock config v1");
    model.config.encode_canonical(&mut config);
    receipt::current_numerics_id(profile, &config.finish().0, &model.weights_hash())
}

/// Build, device and limits: what the bits of every other protection depend on too.
pub fn environment_id(device: &DeviceInfo, settings: &Settings) -> EnvironmentId {
    let limits = [
        ("build", env!("CARGO_PKG_VERSION").to_string()),
        ("device", device.name.clone()),
        ("token_budget", settings.token_budget.value.to_string()),
        ("max_running", settings.max_running.value.to_string()),
        ("prefill_chunk", format!("{:?}", settings.prefill_chunk.value)),
        ("prefix_cache", settings.prefix_cache.value.to_string()),
    ];
    let limits = limits.iter().map(|(k, v)| (*k, v.as_str()));
    receipt::environment_id(limits.chain(device.facts.iter().map(|(k, v)| (k.as_str(), v.as_str()))))
}
