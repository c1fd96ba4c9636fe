//! Tests of the event recorder: which requests become events, and which writes the API server receives.

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::client::Body;
use tokio::task::JoinHandle;

use super::*;
use crate::testing::fixtures;

fn request(note: &str) -> EventRequest {
    let claim: PersistentVolumeClaim = fixtures::claim(json!({}));
    EventRequest::new(
        claim.object_ref(&()),
        Reason::ProvisioningFailed,
        note.to_owned(),
        Timestamp::UNIX_EPOCH,
    )
}

#[test]
fn repetitions_are_counted_and_spaced() {
    let mut aggregator = Aggregator::default();
    let key = EventKey::of(&request("no space"));
    let start = Instant::now();
    assert_eq!(aggregator.observe(&key, start), Some(EventWrite::First));
    aggregator.created(&key, "event-1".to_owned());
    assert_eq!(aggregator.observe(&key, start + Duration::from_secs(1)), None);
    let repeat = |count| Some(EventWrite::Repeat { name: "event-1".to_owned(), count });
    assert_eq!(aggregator.observe(&key, start + Duration::from_secs(10)), repeat(3));
    assert_eq!(aggregator.observe(&key, start + Duration::from_secs(15)), None);
    assert_eq!(aggregator.observe(&key, start + Duration::from_secs(20)), repeat(5));
}

/// A write that the API server received, and its time.
#[derive(Debug)]
struct Written {
    method: http::Method,
    path: String,
    body: serde_json::Value,
    at: Instant,
}

/// A running [`publish`], and an API server that accepts every write.
struct RunningRecorder {
    queue: mpsc::Sender<EventRequest>,
    publishing: JoinHandle<()>,
    serving: JoinHandle<Vec<Written>>,
}

impl RunningRecorder {
    fn start() -> RunningRecorder {
        let (service, mut server) = tower_test::mock::pair::<http::Request<Body>, http::Response<Body>>();
        let (queue, requests) = mpsc::channel(QUEUE_LENGTH);
        let publishing =
            tokio::spawn(publish(Client::new(service, "default"), fixtures::identity(), requests));
        let serving = tokio::spawn(async move {
            let mut seen = Vec::new();
            while let Some((request, respond)) = server.next_request().await {
                let (parts, body) = request.into_parts();
                let body: serde_json::Value =
                    serde_json::from_slice(&body.collect_bytes().await.unwrap()).unwrap();
                let event = Body::from(serde_json::to_vec(&json!({"metadata": body["metadata"]})).unwrap());
                seen.push(Written {
                    method: parts.method,
                    path: parts.uri.path().to_owned(),
                    body,
                    at: Instant::now(),
                });
                respond.send_response(http::Response::new(event));
            }
            seen
        });
        RunningRecorder { queue, publishing, serving }
    }

    /// Waits until all queued requests were processed. Returns the writes.
    async fn finish(self) -> Vec<Written> {
        drop(self.queue);
        self.publishing.await.unwrap();
        self.serving.await.unwrap()
    }
}

#[tokio::test(start_paused = true)]
async fn writes_are_ordered_and_rate_limited() {
    let publishing = RunningRecorder::start();
    let start = Instant::now();
    let about = |number: u32| {
        let mut request = request(&number.to_string());
        request.regarding.name = Some(format!("claim-{number}"));
        request
    };
    for number in 0..BURST + 10 {
        publishing.queue.send(about(number)).await.unwrap();
    }
    tokio::time::sleep(EVENT_INTERVAL * BURST).await;
    let seen = publishing.finish().await;
    let notes: Vec<String> =
        seen.iter().map(|write| write.body["note"].as_str().unwrap().to_owned()).collect();
    assert_eq!(notes, (0..BURST + 10).map(|number| number.to_string()).collect::<Vec<_>>());
    let after = |write: u32| seen[write as usize].at - start;
    assert!(after(BURST - 1) < EVENT_INTERVAL, "{:?}", after(BURST - 1));
    assert!((9 * EVENT_INTERVAL..11 * EVENT_INTERVAL).contains(&after(BURST + 9)), "{:?}", after(BURST + 9));
}

#[tokio::test(start_paused = true)]
async fn shutdown_writes_queued_events_without_limit() {
    let (publishing, start) = (RunningRecorder::start(), Instant::now());
    for number in 0..2 * BURST {
        let mut request = request("no space");
        request.regarding.name = Some(format!("claim-{number}"));
        publishing.queue.send(request).await.unwrap();
    }
    assert_eq!(publishing.finish().await.len(), 2 * BURST as usize);
    assert!(start.elapsed() < EVENT_INTERVAL, "{:?}", start.elapsed());
}

#[tokio::test(start_paused = true)]
async fn unused_tokens_accumulate_to_a_burst() {
    let mut bucket = TokenBucket { next: Instant::now() };
    for idle in [Duration::ZERO, EVENT_INTERVAL * BURST * 2] {
        tokio::time::sleep(idle).await;
        let start = Instant::now();
        for _ in 0..BURST {
            bucket.acquire().await;
        }
        assert_eq!(start.elapsed(), Duration::ZERO, "after {idle:?}");
        bucket.acquire().await;
        assert!(start.elapsed() >= EVENT_INTERVAL / 2);
    }
}

/// The API server receives one event, and then its count.
#[tokio::test(start_paused = true)]
async fn repeated_request_is_two_writes() {
    let publishing = RunningRecorder::start();
    for _ in 0..4 {
        publishing.queue.send(request("no space")).await.unwrap();
        tokio::time::sleep(Duration::from_secs(4)).await;
    }
    let seen = publishing.finish().await;

    let events = "/apis/events.k8s.io/v1/namespaces/shop/events";
    let [created, repeated] = seen.as_slice() else { panic!("{seen:?}") };
    let Written { method: http::Method::POST, path: created_at, body: created, .. } = created else {
        panic!("{created:?}");
    };
    let Written { method: http::Method::PATCH, path: repeated_at, body: repeated, .. } = repeated else {
        panic!("{repeated:?}");
    };
    assert_eq!(created_at, events);
    assert_eq!(created["regarding"]["uid"], fixtures::CLAIM_UID);
    assert_eq!(
        (&created["type"], &created["reason"], &created["note"], &created["reportingController"]),
        (&json!("Warning"), &json!("ProvisioningFailed"), &json!("no space"), &json!("csi.loopfs.dev"))
    );
    assert_eq!(*repeated_at, format!("{events}/{}", created["metadata"]["name"].as_str().unwrap()));
    assert_eq!(repeated["series"]["count"], 4, "the third came too soon after the first to be written");
}

#[test]
fn few_different_texts_are_separate_events() {
    let mut aggregator = Aggregator::default();
    let start = Instant::now();
    for text in 0..TEXTS_PER_SUBJECT {
        assert_eq!(
            aggregator.observe(&EventKey::of(&request(&text.to_string())), start),
            Some(EventWrite::First)
        );
    }
    assert_eq!(aggregator.observe(&EventKey::of(&request("one more")), start), None);
    let mut elsewhere = request("one more");
    elsewhere.regarding.name = Some("other".to_owned());
    assert_eq!(aggregator.observe(&EventKey::of(&elsewhere), start), Some(EventWrite::First));
}

/// A tenant creates claims without end.
#[test]
fn oldest_of_many_subjects_is_forgotten() {
    let mut aggregator = Aggregator::default();
    let start = Instant::now();
    let about = |number: usize| {
        let mut request = request("no space");
        request.regarding.name = Some(format!("claim-{number}"));
        EventKey::of(&request)
    };
    for number in 0..SUBJECTS_MAX {
        assert_eq!(aggregator.observe(&about(number), start), Some(EventWrite::First));
    }
    assert_eq!(aggregator.observe(&about(0), start), None);
    assert_eq!(aggregator.observe(&about(SUBJECTS_MAX), start), Some(EventWrite::First));
    assert_eq!(aggregator.observe(&about(0), start), None, "it was requested again, and is kept");
    assert_eq!(aggregator.observe(&about(1), start), Some(EventWrite::First));
    let known = (aggregator.subjects.len(), aggregator.by_last_request.len());
    assert_eq!(known, (SUBJECTS_MAX, SUBJECTS_MAX));
}

#[test]
fn event_after_failure_or_end_is_new() {
    let mut aggregator = Aggregator::default();
    let key = EventKey::of(&request("no space"));
    let start = Instant::now();
    aggregator.observe(&key, start);
    aggregator.forget(&key);
    for now in [start, start + SERIES_END] {
        assert_eq!(aggregator.observe(&key, now), Some(EventWrite::First));
    }
}

#[test]
fn event_texts_fit_the_api_limits() {
    let mut request = request(&"ä".repeat(1000));
    request.regarding.name = Some("n".repeat(253));
    request.at = Timestamp::MAX;
    let event = new_event(&request, &fixtures::identity(), u64::MAX);
    assert_eq!(event.note.unwrap().len(), NOTE_MAX);
    let name = event.metadata.name.unwrap();
    assert!(name.len() <= NAME_MAX, "{name}");
    assert_eq!(event.metadata.namespace.as_deref(), Some("shop"));
}
