//! Identities: what a result's bits are a function of (NUMERICS.md section 12).

use numerics::{
    NUMERICS_VERSION, Profile,
    digest::{Digest, Encoder},
};
use serde::{Deserialize, Serialize};
use std::fmt;

/// Names numerics version, profile, configuration and weights. Contract kernels give equal bits wherever this is equal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct NumericsId(pub Digest);

/// Names everything else that vendor kernels' bits may depend on: build, kernels, libraries, device, threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct EnvironmentId(pub Digest);

impl fmt::Display for NumericsId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for EnvironmentId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The identity under numerics version `version` ([`NUMERICS_VERSION`] for this build) of a model given by its
/// canonically encoded configuration and the digest of its weights.
pub fn numerics_id(version: u32, profile: Profile, config: &[u8], weights: &Digest) -> NumericsId {
    NumericsId(
        Encoder::new("blocklock numerics-id v1")
            .u32("version", version)
            .text("profile", profile.name())
            .bytes("config", config)
            .digest("weights", weights)
            .finish(),
    )
}

/// [`numerics_id`] under this build's version.
pub fn current_numerics_id(profile: Profile, config: &[u8], weights: &Digest) -> NumericsId {
    numerics_id(NUMERICS_VERSION, profile, config, weights)
}

/// The identity of an environment given as (name, value) facts in a fixed order.
pub fn environment_id<'a>(facts: impl IntoIterator<Item = (&'a str, &'a str)>) -> EnvironmentId {
    let mut encoder = Encoder::new("blocklock environment-id v1");
    for (name, value) in facts {
        encoder.text(name, value);
    }
    EnvironmentId(encoder.finish())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_of_a_numerics_id_matters() {
        let w = Digest([7; 32]);
        let base = numerics_id(0, Profile::IeeeF32, b"config", &w);
        assert_eq!(base, numerics_id(0, Profile::IeeeF32, b"config", &w));
        assert_ne!(base, numerics_id(1, Profile::IeeeF32, b"config", &w));
        assert_ne!(base, numerics_id(0, Profile::IeeeF32, b"confih", &w));
        assert_ne!(
            base,
            numerics_id(0, Profile::IeeeF32, b"config", &Digest([8; 32]))
        );
    }

    #[test]
    fn facts_cannot_run_into_each_other() {
        let ids = [
            environment_id([("a", "bc"), ("d", "")]),
            environment_id([("ab", "c"), ("d", "")]),
            environment_id([("a", "b"), ("d", "c")]),
            environment_id([("d", ""), ("a", "bc")]),
            environment_id([("a", "bc")]),
        ];
        for i in 0..ids.len() {
            for j in 0..i {
                assert_ne!(ids[i], ids[j]);
            }
        }
    }

    #[test]
    fn identities_are_hexadecimal_in_json() {
        let id = environment_id([("threads", "2")]);
        let json = serde_json::to_string(&id).expect("serialises");
        assert_eq!(json, format!("\"{id}\""));
        assert_eq!(id.0.short(), id.to_string()[..12]);
        assert_eq!(
            serde_json::from_str::<EnvironmentId>(&json).expect("parses"),
            id
        );
        assert!(serde_json::from_str::<EnvironmentId>("\"ABC\"").is_err());
    }
}
