//! `inspect`: what a model is, what it costs, and the settings in force.

use crate::Outcome;
use crate::args::{Global, InspectArgs};
use crate::certificates;
use crate::output::{self, bytes, count};
use crate::session::{KvNeed, Opened, Session};
use crate::settings::Settings;
use anyhow::{Result, bail};
use engine::Protection;
use numerics::Profile;
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
    let blocks = opened.kv_blocks()?;
    let session = if args.certify {
        if settings.profile() != Profile::IeeeF32 {
            bail!(
                "--certify: the locked protections need vendor kernels, which profile {} does not have here",
                settings.profile().name()
            );
        }
        let session = opened.start(&Protection::ALL, KvNeed::Settings)?;
        certificates::all_rungs(global, &session)?;
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

fn document(session: &Session, kv_blocks: usize) -> Result<Value> {
    let c = &*session.model().config;
    let info = session.host().info();
    let matmul = matmul_parameters(session);
    let windowed = c.layers.iter().filter(|l| l.window.is_some()).count();
    let rope = c.layers.first().map(|l| l.rope);
    let tokenizer = session.tokenizer().map(|t| {
        json!({
            "vocabulary": t.vocab_size(),
            "bos": t.bos(),
            "end_tokens": t.eos(),
            "adds_bos": t.add_bos(),
            "special_tokens": t.special_tokens().len(),
        })
    });
    let facts: serde_json::Map<String, Value> = info
        .facts
        .iter()
        .map(|(k, v)| (k.clone(), v.clone().into()))
        .collect();
    let supported = |p: Protection| {
        let geometry = session.geometry(p);
        json!({"name": p.name(), "available": geometry["available"], "shapes": geometry["shapes"]})
    };
    let mut document = session.describe();
    document["architecture"] = json!({
        "family": format!("{:?}", c.arch).to_lowercase(),
        "layers": c.layers.len(),
        "windowed_layers": windowed,
        "hidden": c.hidden,
        "feed_forward": c.ffn,
        "heads": c.heads,
        "kv_heads": c.kv_heads,
        "head_dim": c.head_dim,
        "vocabulary": c.vocab_size,
        "context": c.context,
        "norm_eps": c.norm_eps,
        "rope_theta": rope.map(|r| r.theta),
        "rope_scaling": rope.map(|r| format!("{:?}", r.scaling)),
        "tied_embedding": session.model().weights.lm_head.is_none(),
    });
    document["weights"] = json!({
        "parameters": session.model().parameters(),
        "bytes": session.model().weight_bytes(),
        "formats": session.model().formats(),
        "hash": session.model().weights_hash().to_string(),
    });
    document["cost"] = json!({
        "matmul_flops_per_token": 2 * matmul,
        "kv_bytes_per_token": session.kv_bytes_per_token(),
        "kv_blocks": kv_blocks,
    });
    document["tokenizer"] = json!(tokenizer);
    document["chat_template"] = json!(session.template().map(|t| t.source().len()));
    document["device_facts"] = Value::Object(facts);
    document["protections"] = Protection::ALL.into_iter().map(supported).collect();
    document["certificates"] = serde_json::to_value(certificates::all(session))?;
    document["settings"] = serde_json::to_value(session.settings())?;
    Ok(document)
}

/// Weights that every token is multiplied with: all matrices, the head's included, the embedding look-up not.
fn matmul_parameters(session: &Session) -> u64 {
    let c = &*session.model().config;
    let (q, kv) = (c.heads * c.head_dim, c.kv_heads * c.head_dim);
    let layer = c.hidden * (2 * q + 2 * kv) + 3 * c.hidden * c.ffn;
    (c.layers.len() * layer + c.vocab_size * c.hidden) as u64
}

fn text(d: &Value) -> String {
    let show = |v: &Value| match v {
        Value::String(s) => s.clone(),
        Value::Null => "none".into(),
        Value::Array(list) if list.is_empty() => "none".into(),
        other => other.to_string(),
    };
    let number = |v: &Value| count(v.as_u64().unwrap_or(0));
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
    out += &format!(
        "weights        {} parameters, {} ({})\n",
        number(&w["parameters"]),
        bytes(w["bytes"].as_u64().unwrap_or(0)),
        show(&w["formats"]),
    );
    out += &format!(
        "cost           {} FLOPs a token in products; KV {} a token, {} blocks of 64 tokens\n",
        number(&cost["matmul_flops_per_token"]),
        bytes(cost["kv_bytes_per_token"].as_u64().unwrap_or(0)),
        cost["kv_blocks"],
    );
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
    out += &format!("device         {}\n", show(&d["device"]));
    for (key, value) in d["device_facts"].as_object().into_iter().flatten() {
        out += &format!("               {key}: {}\n", show(value));
    }
    let protections: Vec<String> = d["protections"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|p| {
            let refused = if p["available"] == true {
                ""
            } else {
                " (not available here)"
            };
            format!("{}{refused}", show(&p["name"]))
        })
        .collect();
    out += &format!("protections    {}\n", protections.join(", "));
    for c in d["certificates"].as_array().into_iter().flatten() {
        let shares = match c["equivariant"] == true {
            true => "; a target's row does not matter",
            false => "",
        };
        let verdict = match &c["broken_by"] {
            Value::Null => "certified".to_string(),
            by => format!("NOT KEPT HERE: changed by {}", show(by)),
        };
        out += &format!(
            "               {}: {} {verdict}{shares}\n",
            show(&c["protection"]),
            show(&c["geometry"])
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
