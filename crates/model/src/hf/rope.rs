//! Rotary embeddings of config.json: `rope_theta` and `rope_scaling`, or the newer `rope_parameters`, which holds both.

use super::object::{ConfigFileError, Object};
use crate::config::Rope;
use crate::gguf::shown;
use numerics::rope::RopeScaling;
use serde_json::{Map, Value};

/// Bases where a file names none.
const THETA: f64 = 10_000.0;
const GEMMA_FULL_THETA: f64 = 1_000_000.0;

/// One rotary embedding for all layers.
pub(super) fn uniform(o: &mut Object) -> Result<Rope, ConfigFileError> {
    let theta = o.number("rope_theta")?;
    let (old, new) = old_or_new(o)?;
    let (map, key) = match old {
        Some(old) => (Some(old), "rope_scaling"),
        None => (new, "rope_parameters"),
    };
    one(map, o.full(key), theta, "rope_theta", THETA)
}

/// Gemma's two: of full layers, which alone are scaled, and of sliding ones.
pub(super) fn full_and_sliding(o: &mut Object) -> Result<(Rope, Rope), ConfigFileError> {
    let full_theta = o.number("rope_theta")?;
    let sliding_theta = o.number("rope_local_base_freq")?;
    let (old, new) = old_or_new(o)?;
    let (mut full, mut sliding, mut paths) = (old, None, [o.full("rope_scaling"), String::new()]);
    if let Some(new) = new {
        let mut by_type = Object::new(new, o.full("rope_parameters."));
        full = by_type.object("full_attention")?;
        sliding = by_type.object("sliding_attention")?;
        paths = ["full_attention", "sliding_attention"].map(|key| by_type.full(key));
        by_type.refuse_unknown(&[])?;
    }
    let [full_path, sliding_path] = paths;
    Ok((
        one(full, full_path, full_theta, "rope_theta", GEMMA_FULL_THETA)?,
        one(
            sliding,
            sliding_path,
            sliding_theta,
            "rope_local_base_freq",
            THETA,
        )?,
    ))
}

type Found<'a> = Option<&'a Map<String, Value>>;

fn old_or_new<'a>(o: &mut Object<'a>) -> Result<(Found<'a>, Found<'a>), ConfigFileError> {
    let old = o.object("rope_scaling")?;
    let new = o.object("rope_parameters")?;
    if let (Some(_), Some(new)) = (old, new) {
        let given = Value::Object(new.clone());
        let allowed = "absent where rope_scaling is given";
        return Err(o.refused("rope_parameters", &given, allowed));
    }
    Ok((old, new))
}

/// One rotary embedding out of the object at `path`; `theta` is what the key `beside` says next to it.
fn one(
    map: Found,
    path: String,
    theta: Option<f64>,
    beside: &str,
    unsaid: f64,
) -> Result<Rope, ConfigFileError> {
    let Some(map) = map else {
        return Ok(Rope {
            theta: theta.unwrap_or(unsaid),
            scaling: RopeScaling::None,
        });
    };
    let mut r = Object::new(map, path + ".");
    let inner_theta = r.number("rope_theta")?;
    if let (Some(a), Some(b)) = (theta, inner_theta)
        && a != b
    {
        let allowed = format!("{beside} {a}, given beside it");
        return Err(r.refused("rope_theta", &b.into(), &allowed));
    }
    let (rope_type, old_type) = (r.str("rope_type")?, r.str("type")?);
    if let (Some(a), Some(b)) = (rope_type, old_type)
        && a != b
    {
        return Err(r.refused("type", &b.into(), &format!("rope_type \"{}\"", shown(a))));
    }
    r.only("partial_rotary_factor", &1.0.into())?;
    let scaling = match rope_type.or(old_type).unwrap_or("default") {
        "default" => RopeScaling::None,
        // A factor of 1 changes no bit; one identity for one computation.
        "linear" => match r.required_number("factor")? {
            1.0 => RopeScaling::None,
            factor => RopeScaling::Linear { factor },
        },
        "llama3" => RopeScaling::Llama3 {
            factor: r.required_number("factor")?,
            low_freq_factor: r.required_number("low_freq_factor")?,
            high_freq_factor: r.required_number("high_freq_factor")?,
            original_context: r.required_size("original_max_position_embeddings")?,
        },
        other => return Err(r.refused("rope_type", &other.into(), "default, linear, llama3")),
    };
    r.refuse_unknown(&[])?;
    Ok(Rope {
        theta: theta.or(inner_theta).unwrap_or(unsaid),
        scaling,
    })
}
