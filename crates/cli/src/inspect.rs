//! `inspect`: what a model is, what it costs, and the settings in force.

use crate::Outcome;
use crate::args::{Global, InspectArgs};
use crate::certificates;
use crate::output::{self, bytes, count};
use crate::session::{KvNeed, Opened, Session};
use crate::settings::Settings;
use anyhow::{Result, bail};
use device::DeviceName;
use engine::Protection;
use engine::certify::Certificate;
use numerics::Profile;
use numerics::rope::RopeScaling;
use serde_json::{Value, json};

/// Runs the command.
pub fn run(global: &Global, args: &InspectArgs) -> Result<Outcome> {
    let settings = Settings::resolve(global)?;
    let opened = Opened::open(&settings)?;
    if args.template {
        let Some(template) = opened.template() else {
            bail!("{} has no chat template", opened.name());
        };
        if global.json {
            output::print_json(&json!({"template": template.source()}))?;
        } else {
            output::print(&format!("{}\n", template.source().trim_end()))?;
        }
        return Ok(Outcome::Done);
    }
    if args.shape {
        // A shape is described without its device; a GPU's memory stays unknown.
        let known = settings.kv_memory.value.is_some();
        let blocks = known.then(|| opened.kv_blocks()).transpose()?;
        let document = shape(&opened, blocks);
        if global.json {
            output::print_json(&document)?;
        } else {
            output::print(&shape_text(&document))?;
        }
        return Ok(Outcome::Done);
    }
    let blocks = opened.kv_blocks()?;
    let session = if args.certify {
        let cpu = settings.device()? == DeviceName::Cpu;
        if cpu && settings.profile() != Profile::IeeeF32 {
            bail!(
                "--certify: the locked protections need vendor kernels, which profile {} does not have here",
                settings.profile().name()
            );
        }
        let session = opened.start(&Protection::ALL, KvNeed::Settings)?;
        certificates::all_rungs(global, &session, &engine::Protection::ALL, None)?;
        session
    } else {
        // One block of KV is enough to ask the device what it is.
        opened.start(&settings.protections(&[]), KvNeed::Blocks(1))?
    };
    let document = document(&session, blocks)?;
    if global.json {
        output::print_json(&document)?;
    } else {
        output::print(&text(&document))?;
    }
    Ok(Outcome::Done)
}

/// What the configuration and the weights' shapes say.
fn shape(opened: &Opened, kv_blocks: Option<usize>) -> Value {
    let model = opened.model();
    let c = &*model.config;
    let full = c.layers.iter().find(|l| l.window.is_none());
    let sliding = c.layers.iter().find(|l| l.window.is_some());
    let rope = full.or(sliding).map(|l| l.rope);
    let windows = sliding.map(|l| {
        json!({
            "layers": c.layers.iter().filter(|l| l.window.is_some()).count(),
            "tokens": l.window,
            "rope_theta": l.rope.theta,
            "rope_scaling": scaling(&l.rope.scaling),
        })
    });
    let parts = model.weights.layers.first().map(|l| {
        let has = [
            ("q/k/v biases", l.q_bias.is_some()),
            ("q/k norms", l.q_norm.is_some()),
            ("norms behind branches", l.post_attn_norm.is_some()),
        ];
        has.into_iter()
            .filter(|(_, has)| *has)
            .map(|(name, _)| name)
            .collect::<Vec<_>>()
    });
    let tokenizer = opened.tokenizer().map(|t| {
        json!({
            "vocabulary": t.vocab_size(),
            "bos": t.bos(),
            "end_tokens": t.eos(),
            "adds_bos": t.add_bos(),
            "special_tokens": t.special_tokens().len(),
        })
    });
    json!({
        "model": opened.name(),
        "architecture": {
            "family": format!("{:?}", c.arch).to_lowercase(),
            "layers": c.layers.len(),
            "windows": windows,
            "parts": parts,
            "hidden": c.hidden,
            "feed_forward": c.ffn,
            "activation": format!("{:?}", c.activation),
            "heads": c.heads,
            "kv_heads": c.kv_heads,
            "head_dim": c.head_dim,
            "attention_scale": c.attn_scale,
            "embedding_scale": c.embed_scale,
            "vocabulary": c.vocab_size,
            "context": c.context,
            "norm_eps": c.norm_eps,
            "rope_theta": rope.map(|r| r.theta),
            "rope_scaling": rope.map(|r| scaling(&r.scaling)),
            "tied_embedding": model.weights.lm_head.is_none(),
        },
        "weights": {
            "parameters": model.parameters(),
            "bytes": model.weight_bytes(),
            "formats": model.formats(),
        },
        "cost": {
            "matmul_flops_per_token": 2 * matmul_parameters(opened),
            "attention_flops_per_key": 4 * c.layers.len() * c.heads * c.head_dim,
            "weight_bytes_per_token": matmul_bytes(opened),
            "kv_bytes_per_token": opened.kv_bytes_per_token(),
            "kv_blocks": kv_blocks,
        },
        "tokenizer": tokenizer,
        "chat_template": opened.template().map(|t| t.source().len()),
    })
}

fn document(session: &Session, kv_blocks: usize) -> Result<Value> {
    let info = session.host().info();
    let facts: serde_json::Map<String, Value> = info
        .facts
        .iter()
        .map(|(k, v)| (k.clone(), v.clone().into()))
        .collect();
    let planners = engine::protections::all(&session.facts(), &session.settings().locked());
    let supported = |p: Protection| {
        let geometry = session.geometry(p);
        let planner = planners.iter().find(|(of, _)| *of == p).map(|(_, p)| p);
        let context = session.facts().context;
        let longest =
            planner.map(|planner| longest_prompt(context, |len| planner.refuses(len).is_none()));
        let can = planner.map(|planner| planner.capabilities());
        json!({
            "name": p.name(),
            "available": geometry["available"],
            "kernels": geometry["kernels"],
            "shapes": geometry["shapes"],
            "longest_prompt": longest,
            "prefix_cache": can.map(|c| c.cacheable),
            "chunked_prefill": can.map(|c| c.chunkable),
            "preemption": can.map(|c| c.preemptible),
            "bits_follow": match p {
                Protection::None => "everything in the batch",
                Protection::Invariant => "the request and the numerics id",
                _ => "the request, the shapes and both ids",
            },
        })
    };
    let mut document = session.describe();
    if let (Value::Object(all), Value::Object(shape)) =
        (&mut document, shape(session, Some(kv_blocks)))
    {
        // What the session calls the model stands.
        all.extend(shape.into_iter().filter(|(key, _)| key != "model"));
    }
    document["weights"]["hash"] = session.model().weights_hash().to_string().into();
    document["device_facts"] = Value::Object(facts);
    document["protections"] = Protection::ALL.into_iter().map(supported).collect();
    let shown = |c: &Certificate| -> Result<Value> {
        let mut shown = serde_json::to_value(c)?;
        shown["verdict"] = certificates::verdict(c).into();
        Ok(shown)
    };
    let kept = certificates::all(session);
    document["certificates"] = kept.iter().map(shown).collect::<Result<Value>>()?;
    document["settings"] = serde_json::to_value(session.settings())?;
    Ok(document)
}

/// The most tokens of a prompt that fits, up to `context`: what fits does so at every lesser length.
fn longest_prompt(context: usize, fits: impl Fn(usize) -> bool) -> usize {
    let (mut fit, mut beyond) = (0, context + 1);
    while beyond - fit > 1 {
        let middle = fit + (beyond - fit) / 2;
        match fits(middle) {
            true => fit = middle,
            false => beyond = middle,
        }
    }
    fit
}

/// Weights that every token is multiplied with: all matrices, the head's included, the embedding look-up not.
fn matmul_parameters(opened: &Opened) -> u64 {
    let c = &*opened.model().config;
    let (q, kv) = (c.heads * c.head_dim, c.kv_heads * c.head_dim);
    let layer = c.hidden * (2 * q + 2 * kv) + 3 * c.hidden * c.ffn;
    (c.layers.len() * layer + c.vocab_size * c.hidden) as u64
}

/// The same in bytes as stored: what one token alone makes a device read.
fn matmul_bytes(opened: &Opened) -> u64 {
    let w = &opened.model().weights;
    let layers = w.layers.iter().flat_map(|l| l.matrices());
    let head = w.lm_head.as_ref().unwrap_or(&w.embed);
    let bytes = layers.map(|(_, t)| t.size()).sum::<usize>() + head.size();
    bytes as u64
}

/// How a layer's rotations are scaled.
fn scaling(rope: &RopeScaling) -> String {
    match rope {
        RopeScaling::None => "none".into(),
        RopeScaling::Linear { factor } => format!("linear, factor {factor}"),
        RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_context,
        } => format!(
            "llama3, factor {factor}, frequency factors {low_freq_factor} and {high_freq_factor}, original context {}",
            count(*original_context as u64)
        ),
    }
}

fn number(v: &Value) -> String {
    count(v.as_u64().unwrap_or(0))
}

fn show(v: &Value) -> String {
    match v {
        Value::String(s) => s.clone(),
        Value::Null => "none".into(),
        Value::Array(list) if list.is_empty() => "none".into(),
        other => other.to_string(),
    }
}

/// [`shape`] for people.
fn shape_text(d: &Value) -> String {
    let size = |v: &Value| bytes(v.as_u64().unwrap_or(0));
    let (a, w, cost) = (&d["architecture"], &d["weights"], &d["cost"]);
    let mut out = format!("model          {}\n", show(&d["model"]));
    out += &format!(
        "architecture   {}: {} layers, hidden {}, feed-forward {}, {} heads / {} KV of {}, vocabulary {}, context {}\n",
        show(&a["family"]),
        a["layers"],
        a["hidden"],
        a["feed_forward"],
        a["heads"],
        a["kv_heads"],
        a["head_dim"],
        number(&a["vocabulary"]),
        number(&a["context"]),
    );
    out += &format!(
        "               rope theta {}, scaling {}, norm eps {}, embedding {}\n",
        a["rope_theta"],
        show(&a["rope_scaling"]),
        a["norm_eps"].as_f64().unwrap_or(0.0) as f32,
        if a["tied_embedding"] == true {
            "tied"
        } else {
            "and head apart"
        },
    );
    if let Some(windows) = a["windows"].as_object() {
        out += &format!(
            "               {} layers see {} tokens, rope theta {}, scaling {}\n",
            windows["layers"],
            windows["tokens"],
            windows["rope_theta"],
            show(&windows["rope_scaling"]),
        );
    }
    let mut parts: Vec<String> = a["parts"]
        .as_array()
        .into_iter()
        .flatten()
        .map(show)
        .collect();
    if let Some(scale) = a["embedding_scale"].as_f64() {
        parts.push(format!("embedding times {}", scale as f32));
    }
    if !parts.is_empty() {
        out += &format!("               {}\n", parts.join(", "));
    }
    out += &format!(
        "weights        {} parameters, {} ({})\n",
        number(&w["parameters"]),
        size(&w["bytes"]),
        show(&w["formats"]),
    );
    out += &format!(
        "cost           a token: {} FLOPs in products and {} for each key it sees; {} of weights read; {} of KV written\n",
        number(&cost["matmul_flops_per_token"]),
        number(&cost["attention_flops_per_key"]),
        size(&cost["weight_bytes_per_token"]),
        size(&cost["kv_bytes_per_token"]),
    );
    let blocks = match &cost["kv_blocks"] {
        Value::Null => "as many KV blocks of 64 tokens as the GPU's memory holds".to_string(),
        n => format!("{n} KV blocks of 64 tokens"),
    };
    out += &format!("               room for {blocks}\n");
    let t = &d["tokenizer"];
    out += &match t {
        Value::Null => "tokenizer      none: prompts are token ids\n".to_string(),
        t => format!(
            "tokenizer      {} tokens, {} special; begins with {}{}; ends at {}\n",
            number(&t["vocabulary"]),
            t["special_tokens"],
            show(&t["bos"]),
            if t["adds_bos"] == true {
                ", added"
            } else {
                ", not added"
            },
            show(&t["end_tokens"]),
        ),
    };
    out += &match &d["chat_template"] {
        Value::Null => "chat template  none\n".to_string(),
        n => format!("chat template  {n} bytes (blocklock inspect --template prints it)\n"),
    };
    out
}

/// The whole document for people.
fn text(d: &Value) -> String {
    let mut out = shape_text(d);
    out += &format!("device         {}\n", show(&d["device"]));
    for (key, value) in d["device_facts"].as_object().into_iter().flatten() {
        out += &format!("               {key}: {}\n", show(value));
    }
    for (i, p) in d["protections"]
        .as_array()
        .into_iter()
        .flatten()
        .enumerate()
    {
        let heading = if i == 0 { "protections" } else { "" };
        let (name, kernels) = (show(&p["name"]), show(&p["kernels"]));
        out += &if p["available"] != true {
            let profile = show(&d["profile"]);
            format!(
                "{heading:<14} {name:<9} not available: no {kernels} kernels for profile {profile} on this device\n"
            )
        } else {
            format!(
                "{heading:<14} {name:<9} {kernels} kernels; {}; prompts to {}; bits follow {}\n",
                show(&p["shapes"]),
                number(&p["longest_prompt"]),
                show(&p["bits_follow"])
            )
        };
    }
    for c in d["certificates"].as_array().into_iter().flatten() {
        out += &format!(
            "               {}: {} {}\n",
            show(&c["protection"]),
            show(&c["geometry"]),
            show(&c["verdict"])
        );
    }
    out += &format!(
        "profile        {} (numerics version {})\n",
        show(&d["profile"]),
        d["numerics_version"]
    );
    out += &format!("numerics id    {}\n", show(&d["numerics_id"]));
    out += &format!("environment id {}\n", show(&d["environment_id"]));
    out += "settings\n";
    for (key, setting) in d["settings"].as_object().into_iter().flatten() {
        out += &format!(
            "  {key:<14} {}  ({})\n",
            show(&setting["value"]),
            show(&setting["from"])
        );
    }
    out
}
