package evernear;

import io.netty.handler.codec.TooLongFrameException;
import io.netty.handler.codec.http.FullHttpRequest;
import io.netty.handler.codec.http.HttpHeaderNames;
import io.netty.handler.codec.http.HttpHeaderValues;
import io.netty.handler.codec.http.HttpHeaders;
import io.netty.handler.codec.http.HttpRequest;
import io.netty.handler.codec.http.HttpResponseStatus;
import io.netty.handler.codec.http.HttpVersion;
import io.netty.handler.codec.http.QueryStringDecoder;
import java.util.List;
import java.util.Set;
import java.util.regex.Pattern;

/**
 * Validates the head of a request. Rejects requests that RFC 9112 forbids, or that two servers on the way could
 * interpret differently.
 */
final class Head {
    private static final String METHODS = "DELETE, GET, HEAD, OPTIONS, POST, PUT";
    private static final Set<String> ALLOWED = Set.of(METHODS.split(", "));
    private static final Pattern LENGTH = Pattern.compile("[0-9]{1,18}");
    private static final Pattern AUTHORITY = Pattern.compile("(?i)^https?://[^/?#]*");

    private Head() {}

    /** Rewrites the target to its origin-form. Throws {@link RejectedException} for an invalid head. */
    static void check(HttpRequest request) {
        checkDecoded(request);
        checkMethod(request);
        checkTarget(request);
        checkFraming(request);
        checkExpectation(request);
    }

    private static void checkDecoded(HttpRequest request) {
        Throwable fault = request.decoderResult().cause();
        if (fault instanceof TooLongFrameException && request instanceof FullHttpRequest) { // without a head
            throw new RejectedException(
                    HttpResponseStatus.REQUEST_URI_TOO_LONG, "TooLong", "The request line is too long.");
        }
        if (fault instanceof TooLongFrameException) {
            throw new RejectedException(
                    HttpResponseStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
                    "TooLarge",
                    "The headers are too large or too many.");
        }
        if (fault != null) {
            throw malformed("The request is not HTTP/1.1: " + fault.getMessage() + ".");
        }
        if (!isHttp11(request) && !request.protocolVersion().equals(HttpVersion.HTTP_1_0)) {
            throw malformed("This API requires HTTP/1.1.");
        }
    }

    private static void checkMethod(HttpRequest request) {
        if (!ALLOWED.contains(request.method().name())) {
            throw new RejectedException(
                            HttpResponseStatus.METHOD_NOT_ALLOWED,
                            "MethodNotAllowed",
                            "The method must be one of " + METHODS + ".")
                    .with(HttpHeaderNames.ALLOW, METHODS);
        }
    }

    /** RFC 9112, section 3.2.2: servers must accept the absolute-form. */
    private static void checkTarget(HttpRequest request) {
        if (!request.uri().startsWith("/")) {
            request.setUri(AUTHORITY.matcher(request.uri()).replaceFirst(""));
        }
        if (!request.uri().startsWith("/")) {
            throw malformed("The request has no path.");
        }
        try {
            QueryStringDecoder decoder = new QueryStringDecoder(request.uri());
            decoder.path();
            decoder.parameters();
        } catch (IllegalArgumentException fault) {
            throw malformed("The path has an invalid escape (%).");
        }
    }

    private static void checkFraming(HttpRequest request) {
        HttpHeaders headers = request.headers();
        List<String> hosts = headers.getAll(HttpHeaderNames.HOST);
        List<String> lengths = headers.getAll(HttpHeaderNames.CONTENT_LENGTH);
        List<String> codings = headers.getAll(HttpHeaderNames.TRANSFER_ENCODING);
        if (hosts.size() > 1 || hosts.isEmpty() && isHttp11(request)) {
            throw malformed("The request must have one Host header.");
        }
        if (!codings.isEmpty() && !(isHttp11(request) && codings.size() == 1 && isChunked(codings.get(0)))) {
            throw malformed("Transfer-Encoding must be chunked, and requires HTTP/1.1.");
        }
        if (lengths.size() + codings.size() > 1 || lengths.size() == 1 && !LENGTH.matcher(lengths.get(0)).matches()) {
            throw malformed("Content-Length must be one number, without Transfer-Encoding.");
        }
    }

    private static void checkExpectation(HttpRequest request) {
        List<String> expectations = request.headers().getAll(HttpHeaderNames.EXPECT);
        if (!expectations.stream().allMatch(HttpHeaderValues.CONTINUE::contentEqualsIgnoreCase)) {
            throw new RejectedException(
                    HttpResponseStatus.EXPECTATION_FAILED, "Expectation", "Expect must be 100-continue.");
        }
    }

    private static boolean isHttp11(HttpRequest request) {
        return request.protocolVersion().equals(HttpVersion.HTTP_1_1);
    }

    private static boolean isChunked(String coding) {
        return HttpHeaderValues.CHUNKED.contentEqualsIgnoreCase(coding);
    }

    private static RejectedException malformed(String message) {
        return new RejectedException(HttpResponseStatus.BAD_REQUEST, "BadRequest", message);
    }
}
