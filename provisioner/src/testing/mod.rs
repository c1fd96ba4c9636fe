//! Test support: a mock API server, a fake store, fixtures, and tests with malformed objects.

pub(crate) mod fake_store;
pub(crate) mod fixtures;
pub(crate) mod malformed_object_tests;
pub(crate) mod mock_api_server;
