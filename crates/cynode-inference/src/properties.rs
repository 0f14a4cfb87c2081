//! Property tests with requests that are generated from the tables.

use proptest::{prelude::*, sample::Index};
use serde_json::{Map, Value, json};

use crate::{
    Endpoint, RefusalCode, Upstream,
    fuzz::{LIMITS, MODELS, has_scheme, request},
    request::shape,
    shape::{ObjectShape, Shape},
};

/// Strings that a server would fetch or read if it took them for an address.
const ADDRESSES: &[&str] = &[
    "http://169.254.169.254/latest/meta-data",
    "https://example.com/x.png",
    "HTTPS://EXAMPLE.COM/",
    " https://example.com",
    "file:///etc/passwd",
    "ftp://example.com/x",
    "gopher://127.0.0.1:11434/_POST",
    "s3://bucket/key",
    "data:text/html,<script>",
    "data:image/svg+xml;base64,AAAA",
    "//example.com/x",
    "/etc/passwd",
    "..",
    "javascript:alert(1)",
    "x-y.z+1:a",
];

fn address() -> impl Strategy<Value = String> {
    proptest::sample::select(ADDRESSES).prop_map(str::to_owned)
}

fn text() -> impl Strategy<Value = String> {
    prop_oneof![address(), ".{0,12}"]
}

fn endpoint() -> impl Strategy<Value = Endpoint> {
    let with_body: Vec<Endpoint> = Endpoint::FIXED
        .iter()
        .filter(|endpoint| shape(endpoint).is_some())
        .cloned()
        .collect();
    proptest::sample::select(with_body)
}

/// Generates values of a shape, with addresses in strings.
fn value(shape: &'static Shape) -> BoxedStrategy<Value> {
    match shape {
        Shape::Boolean => any::<bool>().prop_map(Value::from).boxed(),
        Shape::Text(most) => {
            let most = *most;
            text()
                .prop_filter("short", move |text| text.len() <= most)
                .prop_map(Value::from)
                .boxed()
        }
        Shape::Integer(least, most) => (*least..=*most).prop_map(Value::from).boxed(),
        Shape::Number(least, most) => (*least..=*most).prop_map(Value::from).boxed(),
        Shape::Choice(choices) => proptest::sample::select(*choices)
            .prop_map(Value::from)
            .boxed(),
        Shape::List { items, least, most } => {
            let most = (*most).min(2);
            proptest::collection::vec(value(items), (*least).min(most)..=most)
                .prop_map(Value::from)
                .boxed()
        }
        Shape::Object(shape) => object(shape, None),
        Shape::Tagged(shape) => {
            let variants = shape
                .variants
                .iter()
                .map(|(name, variant)| object(variant, Some((shape.tag, name))));
            proptest::strategy::Union::new(variants).boxed()
        }
        Shape::Nullable(shape) => prop_oneof![Just(Value::Null), value(shape)].boxed(),
        Shape::OneOf(shapes) => proptest::strategy::Union::new(shapes.iter().map(value)).boxed(),
        Shape::Schema => schema().boxed(),
        Shape::AnyObject => (text(), address())
            .prop_map(|(name, address)| json!({ name: [{"url": address}] }))
            .boxed(),
        Shape::Base64 => Just(json!("iVBORw0KGgo=")).boxed(),
        Shape::ImageUrl => Just(json!("data:image/png;base64,iVBORw0KGgo=")).boxed(),
        Shape::CompletionTokens => (1..=LIMITS.completion_tokens).prop_map(Value::from).boxed(),
        Shape::ContextTokens => (1..=LIMITS.context_tokens).prop_map(Value::from).boxed(),
        Shape::KeepAlive => prop_oneof![
            (1..=LIMITS.keep_alive_seconds).prop_map(Value::from),
            (1_000..=LIMITS.keep_alive_seconds * 1_000).prop_map(|time| json!(format!("{time}ms"))),
            (1.0..=f64::from(LIMITS.keep_alive_seconds)).prop_map(Value::from),
        ]
        .boxed(),
        Shape::Unset => proptest::sample::select(vec![
            json!(null),
            json!(false),
            json!(""),
            json!([]),
            json!({}),
        ])
        .boxed(),
    }
}

fn object(shape: &'static ObjectShape, tag: Option<(&str, &str)>) -> BoxedStrategy<Value> {
    let fields: Vec<BoxedStrategy<Option<(String, Value)>>> = shape
        .fields
        .iter()
        .map(|field| {
            let name = field.name.to_owned();
            if let Some((tag, variant)) = tag
                && field.name == tag
            {
                return Just(Some((name, json!(variant)))).boxed();
            }
            let present = value(field.shape).prop_map(move |value| Some((name.clone(), value)));
            if field.is_required {
                present.boxed()
            } else {
                prop_oneof![Just(None), present].boxed()
            }
        })
        .collect();
    fields
        .prop_map(|fields| Value::Object(fields.into_iter().flatten().collect()))
        .prop_shuffle_fields()
}

/// Shuffles fields: nothing depends on their order.
trait ShuffleFields {
    fn prop_shuffle_fields(self) -> BoxedStrategy<Value>;
}

impl<S: Strategy<Value = Value> + 'static> ShuffleFields for S {
    fn prop_shuffle_fields(self) -> BoxedStrategy<Value> {
        self.prop_map(|value| match value {
            Value::Object(members) => members.into_iter().collect::<Vec<_>>(),
            _ => Vec::new(),
        })
        .prop_shuffle()
        .prop_map(|members| Value::Object(Map::from_iter(members)))
        .boxed()
    }
}

fn schema() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(json!({"$ref": "#/$defs/x"})),
        address().prop_map(|address| json!({"description": address, "default": address})),
        address().prop_map(|address| json!({"enum": [address, {"url": address}]})),
    ];
    leaf.prop_recursive(3, 12, 3, |inner| {
        proptest::collection::btree_map("[a-z$]{1,4}|url|\\$ref|id", inner, 0..3)
            .prop_map(|properties| json!({"type": "object", "properties": properties}))
    })
    .prop_filter("an object", Value::is_object)
}

/// Generates a valid body.
fn valid() -> impl Strategy<Value = (Endpoint, Value)> {
    (endpoint(), proptest::sample::select(MODELS)).prop_flat_map(|(endpoint, model)| {
        let shape = shape(&endpoint).expect("an endpoint with a body");
        object(shape, None).prop_map(move |mut body| {
            body["model"] = json!(model);
            let members = body.as_object_mut().expect("an object");
            if members.get("stream") != Some(&json!(true)) {
                members.remove("stream_options");
            }
            if members.contains_key("max_tokens") {
                members.remove("max_completion_tokens");
            }
            (endpoint.clone(), body)
        })
    })
}

/// Returns pointers to all nested values, except those inside arbitrary objects.
fn pointers(value: &Value, here: &str, all: &mut Vec<String>) {
    all.push(here.to_owned());
    match value {
        Value::Array(items) => {
            for (index, item) in items.iter().enumerate() {
                pointers(item, &format!("{here}/{index}"), all);
            }
        }
        Value::Object(members) => {
            for (name, value) in members {
                let is_free = matches!(name.as_str(), "parameters" | "schema" | "arguments")
                    || name == "format" && value.is_object();
                if !is_free {
                    pointers(value, &format!("{here}/{name}"), all);
                }
            }
        }
        _ => {}
    }
}

fn upstream() -> impl Strategy<Value = Upstream> {
    prop_oneof![Just(Upstream::Local), Just(Upstream::Provider)]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    /// `request` checks the round trip, and that no server fetches anything.
    #[test]
    fn every_body_of_the_tables_is_forwarded_and_makes_no_server_fetch(
        (endpoint, body) in valid(),
        upstream in upstream(),
    ) {
        let judged = request(&endpoint, body.to_string().as_bytes(), upstream);
        prop_assert!(judged.is_ok(), "{}: {:?}", body, judged);
    }

    #[test]
    fn an_address_in_place_of_any_value_makes_no_server_fetch(
        (endpoint, mut body) in valid(),
        upstream in upstream(),
        place in any::<Index>(),
        address in address(),
        name in proptest::sample::select(vec![
            "url", "image_url", "file", "file_id", "data", "images", "$ref", "$id", "source",
        ]),
        how in 0..4_u8,
    ) {
        let mut all = Vec::new();
        pointers(&body, "", &mut all);
        let target = body.pointer_mut(place.get(&all).as_str()).expect("a value");
        match (how, target) {
            (0, target) => *target = json!(address),
            (1, target) => *target = json!({ name: address }),
            (2, target) => *target = json!([{"type": name, name: {"url": address}}]),
            (_, Value::Object(members)) => {
                members.insert(name.to_owned(), json!(address));
            }
            (_, target) => *target = json!({"type": name, name: address}),
        }
        drop(request(&endpoint, body.to_string().as_bytes(), upstream));
    }

    #[test]
    fn an_unknown_field_anywhere_is_refused_by_its_name(
        (endpoint, mut body) in valid(),
        place in any::<Index>(),
    ) {
        let mut all = Vec::new();
        pointers(&body, "", &mut all);
        all.retain(|pointer| body.pointer(pointer).is_some_and(Value::is_object));
        // Empty objects stand for unset fields.
        let members = body.pointer_mut(place.get(&all).as_str()).and_then(Value::as_object_mut);
        let members = members.expect("an object");
        prop_assume!(!members.is_empty());
        members.insert("unheard_of".to_owned(), Value::Null);
        let refusal = request(&endpoint, body.to_string().as_bytes(), Upstream::Local);
        let refusal = refusal.expect_err("refused");
        prop_assert_eq!(refusal.code, RefusalCode::InvalidRequest);
        prop_assert!(refusal.message.contains("unheard_of: unknown field"), "{}", refusal);
    }

    #[test]
    fn a_field_that_is_given_twice_anywhere_is_refused((endpoint, body) in valid(), place in any::<Index>()) {
        let text = body.to_string();
        // Each `{"` starts an object with a first field, unless it is part of a string; the mutated
        // text may then not be JSON.
        let starts: Vec<usize> = text.match_indices("{\"").map(|(at, _)| at).collect();
        let at = *place.get(&starts);
        let rest = &text[at + 1..];
        let end = rest[1..].find('"').map_or(rest.len(), |end| end + 2);
        let twice = format!("{}{{{}:0,{rest}", &text[..at], &rest[..end]);
        prop_assume!(serde_json::from_str::<Value>(&twice).is_ok());
        prop_assert!(request(&endpoint, twice.as_bytes(), Upstream::Local).is_err(), "{}", twice);
    }

    #[test]
    fn no_input_is_mishandled(input in proptest::collection::vec(any::<u8>(), 0..200)) {
        crate::fuzz::inference(&input);
    }
}

#[test]
fn the_addresses_are_addresses() {
    for address in ADDRESSES {
        let is_path = address.starts_with(['/', '.']);
        assert!(has_scheme(address) || is_path, "{address}");
    }
}
