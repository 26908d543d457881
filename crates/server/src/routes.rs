//! Paths and their handlers.

use crate::account::Account;
use crate::ask::{self, random};
use crate::conversation::Chat;
use crate::error::{ApiError, Code};
use crate::fields::Fields;
use crate::job::{Job, chat_ids, family};
use crate::openapi;
use crate::page;
use crate::reply;
use crate::server::Shared;
use crate::stream::stream;
use axum::body::{Bytes, to_bytes};
use axum::extract::{Extension, MatchedPath, Path, Request, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde_json::{Value, json};
use std::sync::Arc;

type App = State<Arc<Shared>>;
type Own = Extension<Arc<Account>>;
type Answered = Result<Response, ApiError>;

/// The whole service.
pub fn router(shared: Arc<Shared>) -> Router {
    let api = Router::new()
        .route("/v1/completions", post(completions))
        .route("/v1/chat/completions", post(chat))
        .route("/v1/models", get(models))
        .route("/v1/models/{*name}", get(model))
        .route("/tokenize", post(tokenize))
        .route("/tokenizer_info", get(tokenizer_info))
        .route("/detokenize", post(detokenize))
        .route(
            "/v1/embeddings",
            post(|| refused("embeddings are not supported: this server generates text")),
        )
        .route(
            "/v1/responses",
            post(|| refused("the Responses API is not supported; use /v1/chat/completions")),
        )
        .route(
            "/v1/load_lora_adapter",
            post(|| refused("LoRA adapters are not supported")),
        )
        .route(
            "/v1/unload_lora_adapter",
            post(|| refused("LoRA adapters are not supported")),
        )
        .route_layer(middleware::from_fn_with_state(Arc::clone(&shared), keys));
    Router::new()
        .route("/", get(page::page))
        .route("/live", get(live))
        .route("/health", get(health))
        .route("/version", get(version))
        .route("/openapi.json", get(|| async { Json(openapi::document()) }))
        .route("/metrics", get(metrics))
        .merge(api)
        .fallback(|| async {
            ApiError::new(
                StatusCode::NOT_FOUND,
                "not_found",
                "there is nothing at this path",
            )
        })
        .method_not_allowed_fallback(|| async {
            ApiError::new(
                StatusCode::METHOD_NOT_ALLOWED,
                "method_not_allowed",
                "this path has other methods",
            )
        })
        .layer(middleware::from_fn_with_state(Arc::clone(&shared), account))
        .with_state(shared)
}

/// What connections above their limit get: probes are answered, so that a crowd of clients is not taken for a failure.
pub fn full(shared: Arc<Shared>) -> Router {
    Router::new()
        .route("/live", get(live))
        .route("/health", get(health))
        .route("/metrics", get(metrics))
        .fallback(|| async {
            ApiError::unavailable("the server has all the connections it may have")
        })
        .layer(middleware::map_response(|mut response: Response| async {
            let close = HeaderValue::from_static("close");
            response.headers_mut().insert(header::CONNECTION, close);
            response
        }))
        .layer(middleware::from_fn_with_state(Arc::clone(&shared), account))
        .with_state(shared)
}

async fn live() -> Json<Value> {
    Json(json!({"status": "live"}))
}

async fn refused(why: &'static str) -> ApiError {
    ApiError::new(StatusCode::NOT_FOUND, "unsupported", why)
}

/// Gives each request an id, its own where it brought a readable one, and an account.
async fn account(State(shared): App, mut request: Request, next: Next) -> Response {
    let given = request.headers().get("x-request-id");
    let given = given.and_then(|id| Some(id.to_str().ok()?.to_string()));
    let id = match given {
        Some(id) if (1..=128).contains(&id.len()) => id,
        _ => format!("req-{:016x}", random()),
    };
    let path = request.extensions().get::<MatchedPath>();
    let path = path.map_or("other".to_string(), |p| p.as_str().to_string());
    let method = request.method().to_string();
    let metrics = Arc::clone(&shared.metrics);
    let account = Arc::new(Account::new(id.clone(), method, path, metrics));
    request.extensions_mut().insert(Arc::clone(&account));
    let mut response = next.run(request).await;
    let code = response.extensions().get::<Code>().map(|c| c.0);
    account.answered(response.status().as_u16(), code);
    if let Ok(id) = HeaderValue::from_str(&id) {
        response.headers_mut().insert("x-request-id", id);
    }
    response
}

/// Lets only holders of a key through, where there are keys. Hashes are compared, in constant time.
async fn keys(State(shared): App, request: Request, next: Next) -> Answered {
    let keys = &shared.options.keys;
    let given = request.headers().get(header::AUTHORIZATION);
    let given = given.and_then(|v| v.as_bytes().strip_prefix(b"Bearer "));
    let known = given.map(blake3::hash).is_some_and(|given| {
        // All are looked at, so that the time does not tell which matched.
        keys.iter()
            .fold(false, |found, key| found | (*key == given))
    });
    if keys.is_empty() || known {
        return Ok(next.run(request).await);
    }
    Err(ApiError::new(
        StatusCode::UNAUTHORIZED,
        "invalid_api_key",
        "a valid API key is needed: Authorization: Bearer KEY",
    ))
}

async fn health(State(shared): App) -> Answered {
    let engine = shared.served()?.engine.clone();
    let stats = tokio::task::spawn_blocking(move || engine.stats()).await;
    stats.map_err(|e| ApiError::unavailable(e.to_string()))??;
    Ok(Json(json!({"status": "ok"})).into_response())
}

async fn version(State(shared): App) -> Answered {
    let served = shared
        .loaded()
        .ok_or_else(|| ApiError::unavailable("the server is starting"))?;
    let mut version = served.version.clone();
    version["system_fingerprint"] = served.fingerprint().into();
    Ok(Json(version).into_response())
}

async fn metrics(State(shared): App) -> Response {
    let engine = shared.loaded().map(|s| s.engine.clone());
    let stats = match engine {
        Some(engine) => tokio::task::spawn_blocking(move || engine.stats().ok())
            .await
            .ok()
            .flatten(),
        None => None,
    };
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    (
        [(header::CONTENT_TYPE, kind)],
        shared.metrics.text(stats.as_ref()),
    )
        .into_response()
}

fn card(served: &crate::Served) -> Value {
    json!({
        "id": served.name,
        "object": "model",
        "created": 0, // the file's age says nothing about the model
        "owned_by": "blocklock",
        "max_model_len": served.facts.context,
        "protections": served.protections.iter().map(|p| p.name()).collect::<Vec<_>>(),
        "numerics_id": served.numerics_id,
        "environment_id": served.environment_id,
    })
}

async fn models(State(shared): App) -> Answered {
    let served = shared.served()?;
    Ok(Json(json!({"object": "list", "data": [card(served)]})).into_response())
}

async fn model(State(shared): App, Path(name): Path<String>) -> Answered {
    let served = shared.served()?;
    if name != served.name {
        let message = format!("model '{name}' does not exist");
        return Err(ApiError::new(
            StatusCode::NOT_FOUND,
            "model_not_found",
            message,
        ));
    }
    Ok(Json(card(served)).into_response())
}

/// A whole body, within the limits of size and time.
async fn body(shared: &Shared, request: Request) -> Result<Bytes, ApiError> {
    let limit = shared.options.body_bytes;
    let read = tokio::time::timeout(
        shared.options.body_time,
        to_bytes(request.into_body(), limit),
    )
    .await;
    match read {
        Ok(Ok(bytes)) => Ok(bytes),
        Ok(Err(e)) => {
            let long = std::error::Error::source(&e)
                .is_some_and(|s| s.to_string().contains("length limit"));
            Err(match long {
                true => ApiError::new(
                    StatusCode::PAYLOAD_TOO_LARGE,
                    "body_too_large",
                    format!("the body is longer than {limit} bytes, the limit"),
                ),
                false => ApiError::new(
                    StatusCode::BAD_REQUEST,
                    "bad_body",
                    format!("the body cannot be read: {e}"),
                ),
            })
        }
        Err(_) => Err(ApiError::new(
            StatusCode::REQUEST_TIMEOUT,
            "body_timeout",
            "the body took too long to come",
        )),
    }
}

async fn completions(State(shared): App, account: Own, request: Request) -> Answered {
    answer(shared, account.0, request, ask::completion).await
}

async fn chat(State(shared): App, account: Own, request: Request) -> Answered {
    answer(shared, account.0, request, ask::chat).await
}

async fn answer(
    shared: Arc<Shared>,
    account: Arc<Account>,
    request: Request,
    read: fn(&[u8]) -> Result<ask::Asked, ApiError>,
) -> Answered {
    let (in_flight, served) = shared.enter()?;
    let body = body(&shared, request).await?;
    // Tokenizing takes time, and the engine answers between steps.
    let job = blocking(move || Job::start(&served, &shared.options, account, read(&body)?)).await?;
    if job.asked.stream {
        return Ok(stream(job, in_flight));
    }
    reply::whole(job).await
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|e| Err(ApiError::broken(e.to_string())))
}

async fn tokenize(State(shared): App, request: Request) -> Answered {
    let (_in_flight, served) = shared.enter()?;
    let body = body(&shared, request).await?;
    blocking(move || {
        let mut f = Fields::parse(&body)?;
        let _model: Option<String> = f.take("model")?;
        let text: Option<String> = f.take("prompt")?;
        let add_special = f.or("add_special_tokens", true)?;
        let chat = Chat::read(&mut f)?;
        f.finish()?;
        let Some(tokenizer) = &served.tokenizer else {
            return Err(ApiError::unsupported(
                "prompt",
                "this model has no tokenizer",
            ));
        };
        let ids = match (text, chat) {
            (Some(text), None) => tokenizer
                .encode(&text, add_special, true)
                .map_err(|e| ApiError::field("prompt", e))?,
            (None, Some(chat)) => {
                family(&served, Some(&chat))?;
                chat_ids(&served, &chat)?
            }
            _ => {
                return Err(ApiError::field(
                    "prompt",
                    "either prompt or messages is needed",
                ));
            }
        };
        let reply =
            json!({"count": ids.len(), "max_model_len": served.facts.context, "tokens": ids});
        Ok(Json(reply).into_response())
    })
    .await
}

/// What clients that count tokens by this server's tokenizer ask first, under vLLM's names.
async fn tokenizer_info(State(shared): App) -> Answered {
    let served = shared.served()?;
    let Some(tokenizer) = &served.tokenizer else {
        return Err(ApiError::new(
            StatusCode::NOT_FOUND,
            "unsupported",
            "this model has no tokenizer",
        ));
    };
    let token = |id: Option<u32>| id.and_then(|id| tokenizer.token(id));
    let eos = token(tokenizer.eos().first().copied());
    Ok(Json(json!({
        "tokenizer_class": "blocklock",
        "bos_token": token(tokenizer.bos()),
        "eos_token": eos,
        "pad_token": eos, // nothing here is padded
        "add_bos_token": tokenizer.add_bos(),
        "model_max_length": served.facts.context,
        "chat_template": served.template.as_ref().map(|t| t.source()),
    }))
    .into_response())
}

async fn detokenize(State(shared): App, request: Request) -> Answered {
    let (_in_flight, served) = shared.enter()?;
    let body = body(&shared, request).await?;
    blocking(move || {
        let mut f = Fields::parse(&body)?;
        let _model: Option<String> = f.take("model")?;
        let tokens: Option<Vec<u32>> = f.take("tokens")?;
        f.finish()?;
        let tokens = tokens.ok_or_else(|| ApiError::field("tokens", "missing"))?;
        let Some(tokenizer) = &served.tokenizer else {
            return Err(ApiError::unsupported(
                "tokens",
                "this model has no tokenizer",
            ));
        };
        let vocab = served.facts.vocab;
        if let Some(id) = tokens.iter().find(|&&t| t as usize >= vocab) {
            return Err(ApiError::field(
                "tokens",
                format!("{id} is outside the vocabulary of {vocab}"),
            ));
        }
        Ok(Json(json!({"prompt": tokenizer.decode(&tokens, false)})).into_response())
    })
    .await
}
