//! Which notices become events, and what the API server is sent.

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::client::Body;

use super::*;
use crate::fixtures;

fn notice(note: &str) -> Notice {
    let claim: PersistentVolumeClaim = fixtures::claim(json!({}));
    Notice { regarding: claim.object_ref(&()), reason: Reason::ProvisioningFailed, note: note.to_owned() }
}

#[test]
fn repetitions_become_a_count_and_are_spaced() {
    let mut aggregator = Aggregator::default();
    let key = Key::of(&notice("no space"));
    let start = Instant::now();
    assert_eq!(aggregator.observe(&key, start), Verdict::First);
    aggregator.created(&key, "event-1".to_owned());
    assert_eq!(aggregator.observe(&key, start + Duration::from_secs(1)), Verdict::Suppress);
    let repeat = |count| Verdict::Repeat { name: "event-1".to_owned(), count };
    assert_eq!(aggregator.observe(&key, start + Duration::from_secs(10)), repeat(3));
    assert_eq!(aggregator.observe(&key, start + Duration::from_secs(15)), Verdict::Suppress);
    assert_eq!(aggregator.observe(&key, start + Duration::from_secs(20)), repeat(5));
}

/// What the API server is sent: one event, and then its count.
#[tokio::test(start_paused = true)]
async fn the_same_notice_over_and_over_is_two_writes() {
    let (service, mut server) = tower_test::mock::pair::<http::Request<Body>, http::Response<Body>>();
    let (queue, notices) = mpsc::channel(QUEUE_LENGTH);
    let publishing = tokio::spawn(publish(Client::new(service, "default"), fixtures::identity(), notices));
    let answering = tokio::spawn(async move {
        let mut seen = Vec::new();
        while let Some((request, respond)) = server.next_request().await {
            let (parts, body) = request.into_parts();
            let body: serde_json::Value =
                serde_json::from_slice(&body.collect_bytes().await.unwrap()).unwrap();
            seen.push((parts.method, parts.uri.path().to_owned(), body.clone()));
            let event = Body::from(serde_json::to_vec(&json!({"metadata": body["metadata"]})).unwrap());
            respond.send_response(http::Response::new(event));
        }
        seen
    });
    for _ in 0..4 {
        queue.send(notice("no space")).await.unwrap();
        tokio::time::sleep(Duration::from_secs(4)).await;
    }
    drop(queue);
    publishing.await.unwrap();
    let seen = answering.await.unwrap();

    let events = "/apis/events.k8s.io/v1/namespaces/shop/events";
    let [(http::Method::POST, created_at, created), (http::Method::PATCH, repeated_at, repeated)] =
        seen.as_slice()
    else {
        panic!("{seen:?}");
    };
    assert_eq!(created_at, events);
    assert_eq!(created["regarding"]["uid"], fixtures::CLAIM_UID);
    assert_eq!(
        (&created["type"], &created["reason"], &created["note"], &created["reportingController"]),
        (&json!("Warning"), &json!("ProvisioningFailed"), &json!("no space"), &json!("csi.loopfs.dev"))
    );
    assert_eq!(*repeated_at, format!("{events}/{}", created["metadata"]["name"].as_str().unwrap()));
    assert_eq!(repeated["series"]["count"], 4, "the third came too soon after the first to be told");
}

#[test]
fn an_old_series_ends() {
    let mut aggregator = Aggregator::default();
    let key = Key::of(&notice("no space"));
    let start = Instant::now();
    aggregator.observe(&key, start);
    assert_eq!(aggregator.observe(&key, start + SERIES_END), Verdict::First);
}

#[test]
fn a_changed_text_is_an_event_of_its_own_until_there_are_too_many() {
    let mut aggregator = Aggregator::default();
    let start = Instant::now();
    for text in 0..TEXTS_PER_SUBJECT {
        assert_eq!(aggregator.observe(&Key::of(&notice(&text.to_string())), start), Verdict::First);
    }
    assert_eq!(aggregator.observe(&Key::of(&notice("one more")), start), Verdict::Suppress);
    let mut elsewhere = notice("one more");
    elsewhere.regarding.name = Some("other".to_owned());
    assert_eq!(aggregator.observe(&Key::of(&elsewhere), start), Verdict::First);
}

#[test]
fn a_failed_write_starts_over() {
    let mut aggregator = Aggregator::default();
    let key = Key::of(&notice("no space"));
    aggregator.observe(&key, Instant::now());
    aggregator.forget(&key);
    assert_eq!(aggregator.observe(&key, Instant::now()), Verdict::First);
}

#[test]
fn an_event_keeps_within_the_limits_of_the_api() {
    let mut notice = notice(&"ä".repeat(1000));
    notice.regarding.name = Some("n".repeat(253));
    let event = new_event(&notice, &fixtures::identity(), u64::MAX, Timestamp::MAX);
    assert_eq!(event.note.unwrap().len(), NOTE_MAX);
    let name = event.metadata.name.unwrap();
    assert!(name.len() <= NAME_MAX, "{name}");
    assert_eq!(event.metadata.namespace.as_deref(), Some("shop"));
}
