//! The files under `deploy/`, as far as they can be checked without a cluster: fields against their public
//! specifications, and ports, paths, flags and times against the server they start.

use crate::serving::*;
use crate::support::*;
use serde::Deserialize;
use serde_json::{Value, json};
use std::path::PathBuf;
use std::process::Command;

fn deploy(name: &str) -> String {
    let folder = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy"));
    std::fs::read_to_string(folder.join(name)).expect(name)
}

/// The documents of a YAML file, by kind.
fn documents(name: &str) -> Vec<Value> {
    serde_norway::Deserializer::from_str(&deploy(name))
        .map(|one| Value::deserialize(one).unwrap_or_else(|e| panic!("{name}: {e}")))
        .collect()
}

fn of_kind<'a>(documents: &'a [Value], kind: &str) -> &'a Value {
    let found = documents.iter().find(|d| d["kind"] == kind);
    found.unwrap_or_else(|| panic!("no {kind}"))
}

/// Checks a value against a shape: the name of a type, words to choose from ("=A|B"), a list with the shape of its
/// items, or an object with the shapes of its fields, where "field?" may be absent and no other may be there.
fn fits(shape: &Value, value: &Value, at: &str) -> Result<(), String> {
    let wrong = || Err(format!("{at} is {value}, which is no {shape}"));
    let label = |s: &str| {
        let inner = s
            .chars()
            .all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-');
        (1..=63).contains(&s.len()) && inner && !s.starts_with('-') && !s.ends_with('-')
    };
    let number = |s: &str, units: &[&str]| {
        let digits = s.trim_end_matches(|c: char| !c.is_ascii_digit());
        digits.parse::<u64>().is_ok() && units.contains(&&s[digits.len()..])
    };
    let holds = match (shape, value) {
        (Value::String(kind), value) => match (kind.as_str(), value.as_str()) {
            ("string", Some(_)) => true,
            ("label", Some(s)) => label(s),
            ("quantity", Some(s)) => number(s, &["", "m", "Ki", "Mi", "Gi"]),
            ("duration", Some(s)) => number(s, &["s", "m", "h"]),
            ("absolute", Some(s)) => s.starts_with('/'),
            ("integer", None) => value.as_u64().is_some(),
            ("port", None) => value.as_u64().is_some_and(|p| (1..=65535).contains(&p)),
            ("boolean", None) => value.is_boolean(),
            ("labels", None) => value
                .as_object()
                .is_some_and(|m| m.values().all(Value::is_string)),
            ("empty", None) => value.as_object().is_some_and(|m| m.is_empty()),
            (kind, Some(s)) => kind
                .strip_prefix('=')
                .is_some_and(|all| all.split('|').any(|one| one == s)),
            _ => false,
        },
        (Value::Array(item), Value::Array(values)) => {
            for (i, value) in values.iter().enumerate() {
                fits(&item[0], value, &format!("{at}[{i}]"))?;
            }
            !values.is_empty()
        }
        (Value::Object(fields), Value::Object(values)) => {
            let bare = |f: &str| f.trim_end_matches('?').to_string();
            for (field, shape) in fields {
                match values.get(&bare(field)) {
                    Some(value) => fits(shape, value, &format!("{at}.{}", bare(field)))?,
                    None if field.ends_with('?') => {}
                    None => return Err(format!("{at} lacks {field}")),
                }
            }
            let known = |name: &String| fields.keys().any(|f| bare(f) == *name);
            match values.keys().find(|name| !known(name)) {
                Some(name) => return Err(format!("{at} has the unknown field {name}")),
                None => true,
            }
        }
        _ => false,
    };
    if holds { Ok(()) } else { wrong() }
}

#[track_caller]
fn check(shape: Value, document: &Value) {
    let kind = document["kind"].as_str().expect("a kind");
    if let Err(why) = fits(&shape, document, kind) {
        panic!("{why}");
    }
}

/// The fields in use, as the Kubernetes API (1.30) describes them.
fn deployment() -> Value {
    let probe = json!({"httpGet": {"path": "absolute", "port": "label"}, "periodSeconds?": "integer",
                       "timeoutSeconds?": "integer", "failureThreshold?": "integer"});
    let container = json!({
        "name": "label", "image": "string", "imagePullPolicy?": "=Always|IfNotPresent|Never", "args": ["string"],
        "env": [{"name": "string", "value?": "string",
                 "valueFrom?": {"secretKeyRef": {"name": "label", "key": "string", "optional?": "boolean"}}}],
        "ports": [{"name": "label", "containerPort": "port", "protocol?": "=TCP|UDP|SCTP"}],
        "startupProbe": probe, "readinessProbe": probe, "livenessProbe": probe,
        "lifecycle": {"preStop": {"sleep": {"seconds": "integer"}}},
        "resources": {"requests": {"cpu": "quantity", "memory": "quantity"}, "limits": {"memory": "quantity"}},
        "securityContext": {"allowPrivilegeEscalation": "boolean", "readOnlyRootFilesystem": "boolean",
                            "capabilities": {"drop": ["string"]}},
        "volumeMounts": [{"name": "label", "mountPath": "absolute"}],
    });
    json!({
        "apiVersion": "=apps/v1", "kind": "=Deployment",
        "metadata": {"name": "label", "labels": "labels"},
        "spec": {
            "replicas": "integer", "selector": {"matchLabels": "labels"},
            "template": {
                "metadata": {"labels": "labels", "annotations?": "labels"},
                "spec": {
                    "terminationGracePeriodSeconds": "integer", "automountServiceAccountToken": "boolean",
                    "securityContext": {"runAsNonRoot": "boolean", "runAsUser": "integer", "runAsGroup": "integer",
                                        "fsGroup": "integer", "seccompProfile": {"type": "=RuntimeDefault|Unconfined"}},
                    "containers": [container],
                    "volumes": [{"name": "label", "emptyDir": "empty"}],
                },
            },
        },
    })
}

/// Whether `serve` has a flag of this name.
fn has_flag(help: &str, flag: &str) -> bool {
    help.split_whitespace()
        .any(|word| word.trim_end_matches(',') == flag)
}

/// Every `--flag` among these words is one that `serve` takes.
#[track_caller]
fn flags_exist<'a>(words: impl Iterator<Item = &'a str>) {
    let help = run(&["serve", "--help"]).out;
    let flags: Vec<&str> = words.filter(|w| w.starts_with("--")).collect();
    assert!(!flags.is_empty());
    for flag in flags {
        let name = flag.split('=').next().expect("a name");
        assert!(has_flag(&help, name), "serve has no {name}");
    }
}

#[test]
fn the_deployment_and_its_service_fit_each_other_and_the_server() {
    let documents = documents("kubernetes.yaml");
    assert_eq!(documents.len(), 2);
    let (deployment_document, service) = (
        of_kind(&documents, "Deployment"),
        of_kind(&documents, "Service"),
    );
    check(deployment(), deployment_document);
    check(
        json!({"apiVersion": "=v1", "kind": "=Service", "metadata": {"name": "label", "labels": "labels"},
               "spec": {"selector": "labels", "ports": [{"name": "label", "port": "port", "targetPort": "label",
                                                        "protocol?": "=TCP|UDP|SCTP"}]}}),
        service,
    );
    let spec = &deployment_document["spec"];
    let labels = &spec["template"]["metadata"]["labels"];
    assert_eq!(&spec["selector"]["matchLabels"], labels);
    assert_eq!(&service["spec"]["selector"], labels);
    let pod = &spec["template"]["spec"];
    let container = &pod["containers"][0];
    let args: Vec<&str> = container["args"]
        .as_array()
        .expect("a list")
        .iter()
        .filter_map(Value::as_str)
        .collect();
    assert_eq!(args[0], "serve");
    flags_exist(args.iter().copied());
    let value = |flag: &str| {
        let found = args
            .iter()
            .find_map(|a| a.strip_prefix(flag)?.strip_prefix('='));
        found.unwrap_or_else(|| panic!("no {flag}"))
    };
    let port = &container["ports"][0];
    assert_eq!(
        value("--listen"),
        format!("0.0.0.0:{}", port["containerPort"])
    );
    assert_eq!(port["name"], service["spec"]["ports"][0]["targetPort"]);
    let annotations = &spec["template"]["metadata"]["annotations"];
    assert_eq!(
        annotations["prometheus.io/port"],
        port["containerPort"].to_string()
    );
    let seconds = |v: &Value| v.as_u64().expect("seconds");
    let sleep = seconds(&container["lifecycle"]["preStop"]["sleep"]["seconds"]);
    let drain: u64 = value("--drain-time").parse().expect("seconds");
    assert!(seconds(&pod["terminationGracePeriodSeconds"]) > sleep + drain + 5);
    assert_eq!(
        container["volumeMounts"][0]["name"],
        pod["volumes"][0]["name"]
    );

    // Its own arguments start a server that answers every path the file names.
    let mut own: Vec<&str> = args[1..]
        .iter()
        .copied()
        .filter(|a| !a.starts_with("--listen"))
        .collect();
    own.extend(["--model", TINY]);
    let server = Serving::start(&own);
    for probe in ["startupProbe", "readinessProbe", "livenessProbe"] {
        let get = &container[probe]["httpGet"];
        assert_eq!(get["port"], port["name"], "{probe}");
        let reply = server.get(get["path"].as_str().expect("a path"));
        assert_eq!(reply.status, 200, "{probe}");
    }
    assert_eq!(
        server
            .get(annotations["prometheus.io/path"].as_str().expect("a path"))
            .status,
        200
    );
}

#[test]
fn the_pool_and_its_route_fit_the_deployment() {
    let documents = [documents("kubernetes.yaml"), documents("gateway.yaml")].concat();
    let (pool, route) = (
        of_kind(&documents, "InferencePool"),
        of_kind(&documents, "HTTPRoute"),
    );
    check(
        json!({"apiVersion": "=inference.networking.k8s.io/v1", "kind": "=InferencePool", "metadata": {"name": "label"},
               "spec": {"selector": {"matchLabels": "labels"}, "targetPorts": [{"number": "port"}],
                        "endpointPickerRef": {"group?": "string", "kind?": "string", "name": "label",
                                              "port": {"number": "port"}, "failureMode?": "=FailOpen|FailClose"}}}),
        pool,
    );
    let reference = json!({"group": "string", "kind": "string", "name": "label"});
    check(
        json!({"apiVersion": "=gateway.networking.k8s.io/v1", "kind": "=HTTPRoute", "metadata": {"name": "label"},
               "spec": {"parentRefs": [reference], "rules": [{
                   "matches": [{"path": {"type": "=Exact|PathPrefix|RegularExpression", "value": "absolute"}}],
                   "backendRefs": [reference], "timeouts?": {"request": "duration"}}]}}),
        route,
    );
    let pod = &of_kind(&documents, "Deployment")["spec"]["template"];
    assert_eq!(
        pool["spec"]["selector"]["matchLabels"],
        pod["metadata"]["labels"]
    );
    let port = &pod["spec"]["containers"][0]["ports"][0]["containerPort"];
    assert_eq!(&pool["spec"]["targetPorts"], &json!([{"number": port}]));
    let backend = &route["spec"]["rules"][0]["backendRefs"][0];
    let group = pool["apiVersion"]
        .as_str()
        .and_then(|v| v.strip_suffix("/v1"));
    assert_eq!(
        (
            backend["group"].as_str(),
            &backend["kind"],
            &backend["name"]
        ),
        (group, &pool["kind"], &pool["metadata"]["name"])
    );
}

#[test]
fn a_wrong_document_is_noticed() {
    let right = of_kind(&documents("kubernetes.yaml"), "Deployment").clone();
    let container = "/spec/template/spec/containers/0";
    for (pointer, value) in [
        (
            format!("{container}/livenessProbe/httpGet/path"),
            json!("live"),
        ),
        (format!("{container}/ports/0/containerPort"), json!(80000)),
        (
            format!("{container}/resources/limits/memory"),
            json!("4 GB"),
        ),
        (format!("{container}/env"), json!([])),
        ("/spec/replicas".into(), json!("2")),
        ("/metadata".into(), json!({"name": "Upper", "labels": {}})),
        ("/spec/selector".into(), json!({"matchLabel": {}})),
        ("/kind".into(), json!("DaemonSet")),
    ] {
        let mut wrong = right.clone();
        *wrong.pointer_mut(&pointer).expect("it is there") = value;
        assert!(fits(&deployment(), &wrong, "").is_err(), "{pointer}");
    }
    assert_eq!(fits(&deployment(), &right, ""), Ok(()));
}

/// The instructions of the Containerfile, continued lines joined.
fn instructions() -> Vec<(String, String)> {
    let text = deploy("Containerfile").replace("\\\n", " ");
    let lines = text
        .lines()
        .filter(|l| !l.trim().is_empty() && !l.starts_with('#'));
    let split = |l: &str| {
        l.split_once(' ')
            .map(|(a, b)| (a.to_string(), b.trim().to_string()))
    };
    lines.map(|l| split(l).expect("an instruction")).collect()
}

#[test]
fn the_image_runs_a_server_whose_health_its_own_check_sees() {
    let all = instructions();
    let last = |name: &str| {
        let found = all.iter().rev().find(|(n, _)| n == name);
        found.unwrap_or_else(|| panic!("no {name}")).1.as_str()
    };
    let known = [
        "FROM",
        "WORKDIR",
        "COPY",
        "RUN",
        "ENV",
        "VOLUME",
        "USER",
        "EXPOSE",
        "STOPSIGNAL",
        "HEALTHCHECK",
        "ENTRYPOINT",
        "CMD",
    ];
    assert!(
        all.iter().all(|(name, _)| known.contains(&name.as_str())),
        "{all:?}"
    );
    assert_eq!(all.iter().filter(|(name, _)| name == "FROM").count(), 2);
    assert!(
        all[0].1.contains(env!("CARGO_PKG_RUST_VERSION")),
        "{}",
        all[0].1
    );
    assert!(!last("USER").starts_with('0') && last("USER") != "root");
    let words = |list: &str| -> Vec<String> { serde_json::from_str(list).expect("a JSON list") };
    let call = [words(last("ENTRYPOINT")), words(last("CMD"))].concat();
    assert_eq!(call[..2], ["blocklock", "serve"]);
    flags_exist(call.iter().map(String::as_str));
    let port = last("EXPOSE");
    assert!(call.contains(&format!("0.0.0.0:{port}")));

    // The check's command, on another port: good, then not.
    let check = last("HEALTHCHECK")
        .split_once(" CMD ")
        .expect("a command")
        .1;
    let server = Serving::start(&["--model", TINY, "--protections", "none,invariant"]);
    let own = server
        .address
        .rsplit(':')
        .next()
        .expect("a port")
        .to_string();
    let runs = || {
        let words = words(&check.replace(&format!("/{port} "), &format!("/{own} ")));
        let ran = Command::new(&words[0])
            .args(&words[1..])
            .output()
            .expect("bash");
        ran.status.success()
    };
    assert!(runs(), "a server that is ready is healthy");
    drop(server);
    assert!(!runs(), "no server is not");

    let starting = Serving::slowly();
    let own = starting
        .address
        .rsplit(':')
        .next()
        .expect("a port")
        .to_string();
    let words = words(&check.replace(&format!("/{port} "), &format!("/{own} ")));
    let ran = Command::new(&words[0])
        .args(&words[1..])
        .output()
        .expect("bash");
    assert!(!ran.status.success(), "one that starts is not");
}

#[test]
fn the_unit_starts_the_server_and_lets_it_drain() {
    let unit = deploy("blocklock.service");
    let value = |key: &str| {
        let found = unit
            .lines()
            .find_map(|l| l.strip_prefix(key)?.strip_prefix('='));
        found.unwrap_or_else(|| panic!("no {key}"))
    };
    let words: Vec<&str> = value("ExecStart").split(' ').collect();
    assert_eq!(words[1], "serve");
    flags_exist(words.iter().copied());
    let after = |flag: &str| {
        let at = words.iter().position(|w| *w == flag).expect(flag);
        words[at + 1]
    };
    let (drain, stop): (u64, u64) = (
        after("--drain-time").parse().expect("seconds"),
        value("TimeoutStopSec").parse().expect("seconds"),
    );
    assert!(stop > drain + 5);
    assert!(
        value("LoadCredential").starts_with("api-keys:") && after("--api-keys") == "%d/api-keys"
    );

    let folder = folder();
    let here = unit.replace("/usr/local/bin/blocklock", env!("CARGO_BIN_EXE_blocklock"));
    let path = file(&folder, "blocklock.service", here);
    match Command::new("systemd-analyze")
        .args(["verify", &path])
        .output()
    {
        Err(e) => println!("not run: systemd-analyze verify: {e}"),
        Ok(output) => {
            let ran = Ran::from(output);
            let said = !ran.err.contains("blocklock"); // it may speak of other units
            assert!(ran.code == 0 && said, "{}{}", ran.out, ran.err);
        }
    }
}
