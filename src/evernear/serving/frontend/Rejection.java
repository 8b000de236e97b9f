package evernear;

import static java.nio.charset.StandardCharsets.UTF_8;

import io.netty.buffer.Unpooled;
import io.netty.handler.codec.http.DefaultFullHttpResponse;
import io.netty.handler.codec.http.FullHttpResponse;
import io.netty.handler.codec.http.HttpHeaderNames;
import io.netty.handler.codec.http.HttpHeaderValues;
import io.netty.handler.codec.http.HttpResponseStatus;
import io.netty.handler.codec.http.HttpUtil;
import io.netty.handler.codec.http.HttpVersion;
import org.pytorch.serve.http.ErrorResponse;
import org.pytorch.serve.util.JsonUtils;

/** Error responses in the format of TorchServe's errors. */
final class Rejection {
    private Rejection() {}

    static FullHttpResponse of(HttpResponseStatus status, String type, String message) {
        return Json.of(status, new ErrorResponse(status.code(), type, message));
    }
}

/** Thrown when a request is rejected. Contains the response. */
final class RejectedException extends RuntimeException {
    private static final long serialVersionUID = 1;

    private final transient FullHttpResponse response;

    RejectedException(HttpResponseStatus status, String type, String message) {
        super(message, null, false, false);
        response = Rejection.of(status, type, message);
        HttpUtil.setKeepAlive(response, false); // do not read the rest of the request
    }

    RejectedException with(CharSequence header, String value) {
        response.headers().set(header, value);
        return this;
    }

    FullHttpResponse response() {
        return response;
    }
}

/** Responses whose body is a JSON object. */
final class Json {
    private Json() {}

    static FullHttpResponse of(HttpResponseStatus status, Object content) {
        String body = JsonUtils.GSON_PRETTY.toJson(content);
        FullHttpResponse response =
                new DefaultFullHttpResponse(HttpVersion.HTTP_1_1, status, Unpooled.copiedBuffer(body, UTF_8));
        response.headers().set(HttpHeaderNames.CONTENT_TYPE, HttpHeaderValues.APPLICATION_JSON);
        HttpUtil.setContentLength(response, response.content().readableBytes());
        return response;
    }
}
