//! `generate --score`: how probable a text is under the model.

use crate::Outcome;
use crate::args::Global;
use crate::generate::Defaults;
use crate::output;
use crate::session::Session;
use anyhow::{Context, Result, bail};
use engine::{Event, FinishReason, Request, Row};
use serde_json::{Value, json};

/// Scores every token of the prompt but the first, which nothing predicts.
pub fn run(
    global: &Global,
    session: &Session,
    ids: &[u32],
    defaults: &Defaults,
) -> Result<Outcome> {
    if ids.len() < 2 {
        bail!("the text has {} token; scoring needs at least 2", ids.len());
    }
    let rows = prompt_rows(
        session,
        Request {
            log_sum_exp: true,
            ..Request::new(ids.to_vec(), defaults.protection, 0)
        },
    )?;
    let logprobs: Vec<f64> = rows
        .iter()
        .filter_map(|row| Some(f64::from(row.chosen_logit?) - f64::from(row.log_sum_exp?)))
        .collect();
    let nll = -logprobs.iter().sum::<f64>() / logprobs.len().max(1) as f64;
    if global.json {
        let tokens: Vec<Value> = ids[1..]
            .iter()
            .zip(&rows)
            .zip(&logprobs)
            .map(|((id, row), logprob)| {
                json!({
                    "token": id,
                    "text": session.token_text(*id),
                    "logprob": logprob,
                    "logit_bits": row.chosen_logit.map(output::bits),
                    "log_sum_exp_bits": row.log_sum_exp.map(output::bits),
                })
            })
            .collect();
        let mut document = session.describe();
        document["protection"] = defaults.protection.name().into();
        document["prompt_ids"] = json!(ids);
        document["scored_tokens"] = json!(logprobs.len());
        document["mean_nll"] = json!(nll);
        document["perplexity"] = json!(nll.exp());
        document["tokens"] = json!(tokens);
        output::print_json(&document)?;
    } else {
        output::print(&format!(
            "mean NLL {nll:.4} nats a token over {} tokens (perplexity {:.3})\n",
            logprobs.len(),
            nll.exp()
        ))?;
    }
    Ok(Outcome::Done)
}

/// The distribution after every position of the request's prompt.
pub fn prompt_rows(session: &Session, request: Request) -> Result<Vec<Row>> {
    let mut engine = session.engine(session.settings().engine())?;
    engine.submit(Request {
        prompt_rows_from: Some(0),
        ..request
    })?;
    let mut rows = Vec::new();
    while !engine.is_idle() {
        for (_, event) in engine.step().context("the device failed")? {
            match event {
                Event::PromptRow { row, .. } => rows.push(row),
                Event::Finished {
                    reason: FinishReason::Failed(why),
                } => bail!("scoring broke off: {why}"),
                _ => {}
            }
        }
    }
    Ok(rows)
}
